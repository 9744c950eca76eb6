"""One worker's rows of a global batch, if it does not read the other workers' rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

from kerasdist.input.sharding import piece_bounds


@final
@dataclass(frozen=True, eq=False)
class WorkerShard:
    """One worker's rows of a global batch, which consists of the rows of all workers by rank.

    Attributes:
        rows: The worker's rows, in the structure of the batch; empty arrays if it has none.
        sizes: How many rows each worker holds, by rank.
        rank: The rank of this worker.
        alike: Whether the workers' arrays differ in nothing but their number of rows.
        like: A batch with rows, if there is one, for the types and shapes where `rows` is empty.
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
    """Returns where each worker's rows of a global batch begin and end."""
    bounds = piece_bounds(total, workers * replicas_each)
    return [
        (bounds[first][0], bounds[first + replicas_each - 1][1])
        for first in range(0, workers * replicas_each, replicas_each)
    ]


@final
class OwnNumbers:
    """Selects this worker's rows by their numbers in the batch.

    A batch with fewer rows than replicas is not divided: it selects all.
    """

    def __init__(self, replicas: int, own: range) -> None:
        self._replicas, self._each = replicas, len(own)
        self._workers = replicas // self._each
        self._rank = own.start // self._each

    def __call__(self, numbers: Any) -> Any:
        """Returns the numbers of this worker's rows."""
        total = len(numbers)
        if total < self._replicas:
            return numbers
        begin, end = self._bounds(total)[self._rank]
        return numbers[begin:end]

    def batch(self, rows: Any, total: int) -> Any:
        """Returns the selected rows as a `WorkerShard`, or as a global batch if they are all."""
        if total < self._replicas:
            return rows
        sizes = tuple(end - begin for begin, end in self._bounds(total))
        return WorkerShard(rows, sizes, self._rank)

    def _bounds(self, total: int) -> list[tuple[int, int]]:
        return bounds_of_workers(total, self._workers, self._each)
