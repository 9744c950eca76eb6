"""How far apart the workers' values of an array are, from a few numbers that each of them sends.

Workers multiply the array by the same random signs and add up. The difference of two such sums has
the size of the norm of the arrays' difference, whatever the number of elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

# The signs of a line are the same in each line, but for one sign of the whole line.
_SUMS, _LINE, _CHUNK = 16, 1 << 10, 1 << 16

# The norm of a difference by rounding, relative to the array's: between that of some roundings of
# each element in each step of an epoch, and a thousandth. In 16 bits one rounding is a thousandth.
_ROUNDING = {"float64": 1e-8, "float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}

# The size of an array is the norm of its deviations from the mean, but at least this part of its
# norm, if it is nearly constant, and at least this value in each element.
_PART_OF_NORM, _LEAST = 0.1, 1e-6

# The size of fewer elements is their norm, and at least this value in each: what is left of larger
# numbers that cancel, such as in a bias, may be small.
_FEW, _LEAST_OF_FEW = 100, 0.1


def measures_of(array: Any) -> list[float]:
    """Returns the norm, the size, the numbers of elements that are not finite, and the sums."""
    flat = np.asarray(array).reshape(-1)
    squares = total = 0.0
    strange, sums = np.zeros(3), np.zeros(_SUMS)
    turns = np.random.RandomState(1)
    for begin in range(0, flat.size, _CHUNK):
        some = flat[begin : begin + _CHUNK].astype("float64")
        if not np.isfinite(some).all():
            strange += [np.isnan(some).sum(), np.isposinf(some).sum(), np.isneginf(some).sum()]
            some[~np.isfinite(some)] = 0.0
        squares += float(some @ some)
        total += float(some.sum())
        lines = np.pad(some, (0, -some.size % _LINE)).reshape(-1, _LINE)
        signs = 1.0 - 2.0 * turns.randint(0, 2, (len(lines), _SUMS))
        sums += np.sum((lines @ _signs()) * signs, 0)
    if flat.size < _FEW:
        size = max(squares, _LEAST_OF_FEW**2 * flat.size) ** 0.5
    else:
        deviations = squares - total * total / flat.size
        size = max(deviations, _PART_OF_NORM**2 * squares, _LEAST**2 * flat.size) ** 0.5
    return [squares**0.5, size, *strange.tolist(), *sums.tolist()]


def difference(one: Sequence[float], other: Sequence[float]) -> float:
    """Returns the norm of the difference of two arrays, relative to the larger one's size."""
    if list(one[2:5]) != list(other[2:5]):
        return float("inf")
    between = np.subtract(one[5:], other[5:])
    return float(np.sqrt(np.mean(between**2)) / max(one[1], other[1], np.finfo(float).tiny))


def rounding_of(dtype: str) -> float:
    """Returns the largest relative difference that rounding explains; 0 for whole numbers."""
    return _ROUNDING.get(dtype, 0.0)


@cache
def _signs() -> np.ndarray[Any, Any]:
    return 1.0 - 2.0 * np.random.RandomState(0).randint(0, 2, (_LINE, _SUMS))
