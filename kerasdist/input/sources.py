"""Reads batches from any dataset, list or iterable, repeatedly."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

from kerasdist import keras_compat
from kerasdist.core.structures import map_leaves
from kerasdist.errors import InputError


def batches_of(source: Any) -> Callable[[], Iterator[Any]]:
    """Returns a function that starts an iteration over the batches of a source."""
    if keras_compat.is_dataset(source):
        return lambda: iter(keras_compat.batches(source))
    if _is_of_arrays(source):
        raise InputError(
            "Expected a dataset, or a list of batches. Received: arrays, dataset="
            f"{map_leaves(_shown, source)}, whose elements are no batches. Make a dataset of them: "
            "strategy.experimental_make_numpy_dataset((x, y)).batch(global_batch_size)."
        )
    kind = cast("type[Any]", type(source))
    if issubclass(kind, str | bytes | dict) or not _is_iterable(source):
        raise InputError(
            "Expected a dataset, or something to iterate over whose elements are batches. "
            f"Received: dataset of type {kind.__name__}. Put arrays into a dataset first, "
            "or pass a list of batches."
        )
    return lambda: iter(source)


def lasting_batches_of(source: Any) -> Callable[[], Iterator[Any]]:
    """Returns the same as `batches_of`, with batches that the source does not overwrite later.

    A generator may reuse one array for each batch, and the next batch may be fetched before this
    one is used.
    """
    start = batches_of(source)
    return start if is_lasting(source) else lambda: map(copied, start())


def is_lasting(source: Any) -> bool:
    """Returns whether a source does not overwrite a batch's arrays when it yields the next one."""
    return isinstance(source, list | tuple) or keras_compat.yields_new_arrays(source)


def copied(batch: Any) -> Any:
    """Returns a batch of copies of its arrays and tensors."""
    return map_leaves(keras_compat.copied, batch)


def _is_of_arrays(source: Any) -> bool:
    """Returns whether a source is an array, or a tuple of arrays as `fit` takes them."""
    parts = cast("tuple[Any, ...]", source) if isinstance(source, tuple) else (source,)
    return any(map(keras_compat.is_array, parts))


def _shown(leaf: Any) -> str:
    return f"array of shape {tuple(leaf.shape)}" if keras_compat.is_array(leaf) else repr(leaf)[:50]


def _is_iterable(source: Any) -> bool:
    try:
        iter(source)
    except TypeError:
        return False
    return True
