"""A worker's own rows of a global batch, where it has not read the others'."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

from kerasdist.input.sharding import piece_bounds


@final
@dataclass(frozen=True, eq=False)
class WorkerRows:
    """What one worker holds of a global batch, which is all workers' rows, one after another.

    Attributes:
        rows: Its rows, in the structure of the batch; none, if it has none.
        sizes: How many rows each worker holds, by rank.
        rank: Which worker this is.
        alike: Whether the workers' arrays differ in nothing but their number of rows.
        like: Where this worker may have none: some rows of another batch of its data.
    """

    rows: Any
    sizes: tuple[int, ...]
    rank: int
    alike: bool = True
    like: Any = None

    @property
    def size(self) -> int:
        """How many rows this worker holds."""
        return self.sizes[self.rank]

    @property
    def total(self) -> int:
        """How many rows the global batch has."""
        return sum(self.sizes)


def bounds_of_workers(total: int, workers: int, replicas_each: int) -> list[tuple[int, int]]:
    """Returns where each worker's rows of a global batch begin and end.

    Args:
        total: Number of rows in the batch.
        workers: How many workers there are.
        replicas_each: How many replicas each has.
    """
    bounds = piece_bounds(total, workers * replicas_each)
    return [
        (bounds[first][0], bounds[first + replicas_each - 1][1])
        for first in range(0, workers * replicas_each, replicas_each)
    ]


@final
class OwnNumbers:
    """Chooses a worker's own out of the numbers of a batch's rows.

    Of a batch with fewer rows than replicas, which is not divided, it chooses all.
    """

    def __init__(self, replicas: int, own: range) -> None:
        """Notes the worker.

        Args:
            replicas: How many replicas there are on all workers.
            own: The worker's own.
        """
        self._replicas, self._each = replicas, len(own)
        self._workers = replicas // self._each
        self._rank = own.start // self._each

    def __call__(self, numbers: Any) -> Any:
        """Returns the worker's own numbers.

        Args:
            numbers: An array of those of all rows of a batch.
        """
        total = len(numbers)
        if total < self._replicas:
            return numbers
        begin, end = self._bounds(total)[self._rank]
        return numbers[begin:end]

    def batch(self, rows: Any, total: int) -> Any:
        """Returns the rows of the chosen numbers as what they are: a part, or a global batch.

        Args:
            rows: The rows, in the structure of a batch.
            total: How many rows the batch has.
        """
        if total < self._replicas:
            return rows
        sizes = tuple(end - begin for begin, end in self._bounds(total))
        return WorkerRows(rows, sizes, self._rank)

    def _bounds(self, total: int) -> list[tuple[int, int]]:
        return bounds_of_workers(total, self._workers, self._each)
