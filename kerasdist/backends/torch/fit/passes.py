"""A model's calls that gradients are taken of, for some examples at a time, to need less memory.

A call keeps the inputs of each pass alone, and makes the pass once more in the backward pass. What
calls the model sees the outputs of all rows: its loss, metrics and update are those of one call.
Only what a layer does with other rows of the batch could differ, and is refused where it is seen.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import keras
import torch

from kerasdist import config, keras_compat
from kerasdist.backends.torch.replica.collectives import collectives_here
from kerasdist.core.structures import flatten, pack
from kerasdist.errors import UnsupportedError


@contextmanager
def hinting() -> Generator[None]:
    """Adds to an error of a device without memory what may help."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        error.add_note(
            "kerasdist.config.set_most_examples_at_once(n), before the first step, has each "
            "replica compute n examples at a time in training, with the same numbers."
        )
        raise


def calls(
    model: Any, call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Calls a model, in as many passes as it needs."""
    most, count = config.most_examples_at_once(), _rows(args)
    if (
        most is None
        or count <= most
        or not torch.is_grad_enabled()
        or keras_compat.trial() is not None
    ):
        return call(*args, **kwargs)
    _require_rows_alone(model)
    # Of sizes as equal as can be: passes of one shape find kernels and memory that are there.
    passes = -(-count // most)
    ends = [count * number // passes for number in range(passes + 1)]
    again: Any = keras.remat(call)
    parts: list[Any] = []
    for begin, end in pairwise(ends):
        before = _state(model)
        part = again(*_of_rows(args, begin, end, count), **_of_rows(kwargs, begin, end, count))
        if not parts:
            _require_unchanged(model, before)
        parts.append(part)
    return _joined(parts, [end - begin for begin, end in pairwise(ends)])


def _rows(args: Sequence[Any]) -> int:
    """Returns how many examples a call has; 0 if that is not seen, or while Keras builds."""
    leaves = [one for one in flatten(list(args[:1])) if one is not None]
    if not leaves or not all(isinstance(one, torch.Tensor) and one.ndim for one in leaves):
        return 0
    sizes = {len(one) for one in leaves}
    is_symbolic = any(one.device.type == "meta" for one in leaves)
    return 0 if len(sizes) > 1 or is_symbolic else sizes.pop()


def _of_rows(given: Any, begin: int, end: int, count: int) -> Any:
    """Returns some rows of each tensor that has a row for each example, and of its mask."""

    def rows(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.ndim or len(leaf) != count:
            return leaf
        own, mask = leaf[begin:end], keras_compat.get_keras_mask(leaf)
        if mask is not None:
            keras_compat.set_keras_mask(own, mask[begin:end])
        return own

    leaves = [rows(leaf) for leaf in flatten(given)]
    return pack(given, leaves)


def _joined(parts: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Returns the outputs of all passes, one after another, with their masks."""
    leaves: list[Any] = []
    for column in zip(*map(flatten, parts), strict=True):
        if column[0] is None:
            leaves.append(None)
            continue
        if any(not one.ndim or len(one) != size for one, size in zip(column, sizes, strict=True)):
            raise _refused(f"an output of shape {tuple(column[0].shape)} for {sizes[0]} examples")
        whole = torch.cat(list(column))
        masks: list[Any] = [keras_compat.get_keras_mask(one) for one in column]
        if masks[0] is not None:
            keras_compat.set_keras_mask(whole, torch.cat(masks))
        leaves.append(whole)
    return pack(parts[0], leaves)


def _require_rows_alone(model: Any) -> None:
    """Refuses what is known to depend on more than a pass has, before anything is computed."""
    collectives = collectives_here()
    if collectives is not None and collectives.scope.weights is not None:
        raise _refused('weights that are sharded (sharding="full"), which each pass would gather')
    if model._should_torch_compile():
        raise _refused("jit_compile=True")
    for layer in keras_compat.flat_layers(model):
        if isinstance(layer, keras.layers.BatchNormalization) and layer.trainable:
            raise _refused(f"layer={layer.name!r}, which normalizes by the whole global batch")
        if layer.activity_regularizer is not None:
            raise _refused(f"layer={layer.name!r}, whose activity_regularizer adds a loss")
        if config.draws() == "global" and hasattr(layer, "seed_generator"):
            raise _refused(f"layer={layer.name!r}, and set_draws('global')")


def _state(model: Any) -> list[tuple[torch.Tensor, int]]:
    """Returns what a call must not change: seeds, statistics, states."""
    values = [one.value for one in model.non_trainable_variables]
    return [(value, value._version) for value in values]


def _require_unchanged(model: Any, before: Sequence[tuple[torch.Tensor, int]]) -> None:
    for variable, was, now in zip(
        model.non_trainable_variables, before, _state(model), strict=True
    ):
        if was[0] is not now[0] or was[1] != now[1]:
            raise _refused(f"a call that changes variable={variable.path!r}")
    of_weights = sum(one.regularizer is not None for one in model.trainable_weights)
    if len(model.losses) > of_weights:
        raise _refused("a layer that adds a loss of the rows that it gets")


def _refused(what: str) -> UnsupportedError:
    return UnsupportedError(
        "Expected a model that computes each example by itself, for "
        f"kerasdist.config.set_most_examples_at_once. Received: {what}. Take a smaller batch, or "
        "keras.RematScope."
    )
