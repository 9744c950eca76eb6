"""The pieces of variables that the workers of a job divide, one form for all backends."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np


@final
@dataclass(frozen=True)
class Region:
    """Which part of a value a piece is: columns of its elements, laid out in rows of equal length.

    A run of flattened values has one row. A part along an axis has as many rows as there are
    elements along the axes before it.

    Attributes:
        rows: How many rows the value is laid out in.
        begin: The first column.
        end: The column after the last one.
    """

    rows: int
    begin: int
    end: int

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Region:
        """Returns the region of a whole value."""
        return cls(1, 0, math.prod(shape))

    @classmethod
    def along(cls, shape: Sequence[int], axis: int, begin: int, end: int) -> Region:
        """Returns the region of a part along one axis."""
        inner = math.prod(shape[axis + 1 :])
        return cls(math.prod(shape[:axis]), begin * inner, end * inner)

    @property
    def size(self) -> int:
        """How many elements it has."""
        return self.rows * (self.end - self.begin)


@final
@dataclass(frozen=True)
class HeldPiece:
    """What this worker holds of a divided variable. Neither function needs the other workers.

    Attributes:
        region: Which part it is.
        dtype: The name of its type.
        read: Returns its elements, as a NumPy array of any shape.
        write: Replaces its elements by those of a NumPy array of any shape.
    """

    region: Region
    dtype: str
    read: Callable[[], np.ndarray[Any, Any]]
    write: Callable[[np.ndarray[Any, Any]], None]
