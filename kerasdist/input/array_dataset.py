"""Arrays as a dataset of their rows, to shuffle and to batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from kerasdist.core.structures import flatten, map_leaves
from kerasdist.errors import InputError


@final
@dataclass(frozen=True, eq=False)
class RowDataset:
    """The rows of arrays, in their order or shuffled, one by one or in batches.

    It can be iterated repeatedly; shuffled rows come in another order each time.

    Example::

        rows = strategy.experimental_make_numpy_dataset((x, y))
        dataset = strategy.distribute_dataset(rows.shuffle(seed=0).batch(16))

    Attributes:
        arrays: NumPy arrays with the examples along axis 0, nested in any structure.
        batch_size: Number of rows in an element, None for rows without that axis.
        drop_remainder: Whether to leave out a last batch that is smaller.
        shuffled: The generator that draws the order of the rows; None: they are not shuffled.
    """

    arrays: Any
    batch_size: int | None = None
    drop_remainder: bool = False
    shuffled: np.random.Generator | None = None

    def __post_init__(self) -> None:
        shapes = [np.shape(array) for array in flatten(self.arrays)]
        if len({shape[:1] for shape in shapes}) != 1 or not shapes[0]:
            raise InputError(
                "Expected arrays with as many rows, one an example. Received: "
                f"numpy_input of shapes {shapes[:10]}. A list is a structure of arrays: make an "
                "array of a list of numbers."
            )

    def shuffle(self, seed: int | None = None) -> RowDataset:
        """Returns the rows in a random order, another one in each iteration.

        Args:
            seed: The seed of the order; None: a random one.
        """
        generator = np.random.default_rng(seed)
        return RowDataset(self.arrays, self.batch_size, self.drop_remainder, generator)

    def batch(self, batch_size: int, drop_remainder: bool = False) -> RowDataset:
        """Returns the rows in batches.

        Args:
            batch_size: Number of rows in a batch.
            drop_remainder: Whether to leave out a last batch that is smaller.

        Raises:
            ValueError: If `batch_size` is not positive.
        """
        if batch_size < 1:
            raise ValueError(f"Expected batch_size to be positive. Received: {batch_size=}.")
        return RowDataset(self.arrays, batch_size, drop_remainder, self.shuffled)

    def __len__(self) -> int:
        """Returns the number of rows, or of batches."""
        rows = np.shape(flatten(self.arrays)[0])[0]
        if self.batch_size is None:
            return rows
        return rows // self.batch_size if self.drop_remainder else -(-rows // self.batch_size)

    def _order(self, rows: int) -> Any:
        return np.arange(rows) if self.shuffled is None else self.shuffled.permutation(rows)

    def __iter__(self) -> Iterator[Any]:
        rows = np.shape(flatten(self.arrays)[0])[0]
        order = self._order(rows)
        for index in range(len(self)):
            if self.batch_size is None:
                chosen = order[index]
            else:
                chosen = order[index * self.batch_size : (index + 1) * self.batch_size]
            yield map_leaves(lambda array: np.asarray(array)[chosen], self.arrays)  # noqa: B023
