"""How a global batch is cut into the replicas' pieces."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import NoneType
from typing import Any

from kerasdist.errors import InputError
from kerasdist.input.sharding import piece_bounds
from kerasdist.structures import flatten, map_leaves


def divided(batch: Any, replicas: int) -> list[Any]:
    """Cuts a batch into one structure a replica; None and scalars go to all.

    Args:
        batch: Arrays with the examples along axis 0, in any structure.
        replicas: How many replicas there are.

    Raises:
        InputError: If the arrays differ in their number of examples.
    """
    return [rows(batch, *bounds) for bounds in piece_bounds(examples(batch), replicas)]


def examples(batch: Any) -> int:
    """Returns how many examples a batch has, 0 where it has no array.

    Args:
        batch: Arrays with the examples along axis 0, in any structure.

    Raises:
        InputError: If the arrays differ in their number of examples.
    """
    sizes = {leaf.shape[0] for leaf in arrays(batch)}
    if len(sizes) > 1:
        raise InputError(
            "Expected all arrays of a batch to have as many rows, one an example. "
            f"Received: shapes={[tuple(leaf.shape) for leaf in arrays(batch)]}. Hand a table that "
            "is not part of the batch to the model itself, or repeat it a row an example."
        )
    return next(iter(sizes), 0)


def rows(batch: Any, begin: int, end: int, taken: Callable[[Any], Any] = lambda rows: rows) -> Any:
    """Returns a batch with some of its examples.

    Args:
        batch: Arrays with the examples along axis 0, in any structure.
        begin: The first example.
        end: The one after the last.
        taken: What becomes of the rows of an array.
    """
    return map_leaves(lambda leaf: taken(leaf[begin:end]) if has_rows(leaf) else leaf, batch)


def arrays(batch: Any) -> Iterator[Any]:
    """Yields the arrays of a batch.

    Args:
        batch: Arrays with the examples along axis 0, in any structure.
    """
    return filter(has_rows, flatten(batch))


def lists_weights(sample_weight: Any, y: Any) -> bool:
    """Returns whether sample weights are a list with a number for each row.

    As a structure of scalars all replicas would get it whole. A list for several outputs, which
    the targets are too, is none.

    Args:
        sample_weight: What came as sample weights.
        y: What came as targets.
    """
    if not _is_list(sample_weight) or _is_list(y) or isinstance(y, dict) or len(sample_weight) == 0:
        return False
    return not any(
        _is_list(one) or isinstance(one, dict | str | NoneType) or has_rows(one)
        for one in sample_weight
    )


def with_weights_in_rows(batch: Any, stacked: Callable[[Any], Any]) -> Any:
    """Returns a batch of which the sample weights are no list of numbers.

    Args:
        batch: A batch as a source of data yields it.
        stacked: Makes an array of a list of numbers.
    """
    if not _is_list(batch) or len(batch) != 3 or not lists_weights(batch[2], batch[1]):
        return batch
    return (batch[0], batch[1], stacked(batch[2]))


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


def has_rows(leaf: Any) -> bool:
    """Returns whether a leaf is an array with an axis of examples.

    Args:
        leaf: Anything.
    """
    return len(getattr(leaf, "shape", ())) > 0
