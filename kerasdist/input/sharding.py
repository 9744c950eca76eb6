"""Divides a global batch: computes the sizes of the local batches, and cuts the arrays.

A batch of ``total`` examples is cut into consecutive local batches, one per replica. The sizes of
the local batches are as equal as possible, and longer ones come first. The order of the examples is
kept, and each example is in exactly one local batch. If there are fewer examples than replicas, the
last replicas are empty.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from numbers import Number
from types import NoneType
from typing import Any, final

from kerasdist.core.structures import flatten, map_leaves
from kerasdist.errors import InputError

# kerasdist checks the first training step: it compares the replicas' results with one device's.
# `_LEAST` examples per replica are enough to show whether user code computes with several examples
# together, as a contrastive loss does.
_LEAST = 2
# If all replicas have the same number of examples, the check runs on about as many examples as one
# replica has. If the numbers differ, the check runs on up to `_ENOUGH` examples per replica, but on
# at most `_TIMES` times as many as the largest replica has: the effects of different numbers show
# only with more examples. `_LEAST` examples of each replica are used even if they are more than
# these limits allow, as with very many replicas.
_ENOUGH, _TIMES = 8, 4


def piece_sizes(total: int, replicas: int) -> tuple[int, ...]:
    """Returns how many examples each replica holds.

    Args:
        total: Number of examples in the global batch, at least 0.
        replicas: Number of replicas, at least 1.

    Returns:
        One size per replica. The sizes sum to `total`, differ by at most 1, and never increase from
        one replica to the next.
    """
    return tuple(end - begin for begin, end in bounds_of_replicas(total, replicas))


def bounds_of_replica(total: int, replicas: int, replica: int) -> tuple[int, int]:
    """Returns the positions in the global batch where a replica's local batch begins and ends."""
    share, rest = divmod(total, replicas)
    begin = replica * share + min(replica, rest)
    return begin, begin + share + (replica < rest)


def bounds_of_replicas(total: int, replicas: int) -> tuple[tuple[int, int], ...]:
    """Returns where each replica's local batch begins and ends.

    Args:
        total: Number of examples in the global batch, at least 0.
        replicas: Number of replicas, at least 1.

    Returns:
        One pair ``(begin, end)`` per replica, where ``end`` is not included.
    """
    return tuple(bounds_of_replica(total, replicas, one) for one in range(replicas))


def trial_sizes(sizes: Sequence[int]) -> tuple[int, ...]:
    """Returns how many of each replica's examples the check of the first step uses.

    In the check, a single device also takes the step, with these examples of all replicas. If all
    replicas have the same number of examples, the single device gets about as many examples as one
    replica has in a step of `fit`, so that the check needs no more memory for activations. But it
    gets at least `_LEAST` examples from each replica that has at least this many.

    Args:
        sizes: How many examples each replica has.
    """
    largest, replicas = max(sizes), len(sizes)
    is_even = min(sizes) == largest
    most = largest if is_even else max(largest, min(_ENOUGH * replicas, _TIMES * largest))
    return tuple(min(size, max(_LEAST, most // replicas)) for size in sizes)


def split_batch(batch: object, replicas: int) -> list[Any]:
    """Cuts a batch into one batch per replica; a scalar or None in it goes to all replicas."""
    return [rows(batch, *bounds) for bounds in bounds_of_replicas(examples(batch), replicas)]


def examples(batch: object) -> int:
    """Returns how many examples a batch has; 0 if it has no array."""
    sizes = {leaf.shape[0] for leaf in arrays(batch)}
    if len(sizes) > 1:
        raise InputError(
            "Expected all arrays of a batch to have the same number of rows, one per example. "
            f"Received: shapes={[tuple(leaf.shape) for leaf in arrays(batch)]}. Give a table that "
            "is not part of the batch to the model itself, or repeat it for each example."
        )
    return next(iter(sizes), 0)


def rows(batch: object, begin: int, end: int) -> Any:
    """Returns a batch that has only the examples from `begin` to `end`."""
    return map_leaves(lambda leaf: leaf[begin:end] if has_rows(leaf) else leaf, batch)


def arrays(batch: object) -> Iterator[Any]:
    """Yields the arrays of a batch."""
    return filter(has_rows, flatten(batch))


def lists_weights(sample_weight: Any, y: Any) -> bool:
    """Returns whether sample weights are a list with one number per row.

    Such a list must be divided like an array. `split_batch` would take the list for a structure of
    scalars, and give the whole list to every replica. The result is False for a list with one entry
    per output of the model.
    """
    if not _is_list(sample_weight) or _is_list(y) or isinstance(y, dict) or len(sample_weight) == 0:
        return False
    return not any(
        _is_list(one) or isinstance(one, dict | str | NoneType) or has_rows(one)
        for one in sample_weight
    )


def with_weights_in_rows(batch: Any, stacked: Callable[[Any], Any]) -> Any:
    """Replaces a batch's list of sample weights, if it has one number per row, by an array.

    The function `stacked` converts the list to the array. A batch without such a list is returned
    unchanged.
    """
    if not _is_list(batch) or len(batch) != 3 or not lists_weights(batch[2], batch[1]):
        return batch
    return (batch[0], batch[1], stacked(batch[2]))


def _is_list(value: object) -> bool:
    return isinstance(value, list | tuple)


def has_rows(leaf: object) -> bool:
    """Returns whether a leaf is an array with an axis of examples."""
    if not hasattr(leaf, "shape") and not isinstance(leaf, NoneType | str | bytes | Number):
        raise InputError(  # without this error, every replica would get all rows
            "Expected arrays in tuples, lists and dicts as a batch. Received: an object of type "
            f"{type(leaf).__name__}, which cannot be divided. Make a dict or a tuple of its arrays."
        )
    return len(getattr(leaf, "shape", ())) > 0


@final
@dataclass(frozen=True, eq=False)
class WorkerShard:
    """One worker's rows of a global batch, in which all workers' rows follow each other by rank.

    Attributes:
        rows: The worker's rows, in the structure of the batch; empty arrays if it has none.
        size: The number of these rows.
        total: How many rows the global batch has.
        rank: The rank of this worker.
        workers: How many workers there are.
        alike: Whether the workers' arrays differ only in their number of rows.
        like: A batch from which the types and shapes of the arrays can be taken if `rows` is empty.
            It has rows, unless this worker has read no batch with rows.
        given: How many rows each worker holds, by rank. Empty if the global batch is divided as
            evenly as possible, as `piece_sizes` computes.
    """

    rows: Any
    size: int
    total: int
    rank: int
    workers: int
    alike: bool = True
    like: Any = None
    given: tuple[int, ...] = ()

    @classmethod
    def of_sizes(cls, rows: Any, sizes: tuple[int, ...], rank: int, **more: Any) -> WorkerShard:
        """Returns the rows of the worker `rank`; `sizes` has the number of rows of each worker."""
        return cls(rows, sizes[rank], sum(sizes), rank, len(sizes), given=sizes, **more)

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many rows each worker holds, by rank. Computing this is slow in large jobs."""
        return self.given or piece_sizes(self.total, self.workers)

    @property
    def least(self) -> int:
        """How many rows the worker with the fewest rows holds."""
        return min(self.given) if self.given else self.total // self.workers
