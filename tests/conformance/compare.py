"""Two outcomes are one: nested values compared path by path, with the tolerance's reason stated."""

import contextlib
import math
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import numpy as np

from tests.conformance.registry import KIND


@dataclass(frozen=True)
class Tolerance:
    rtol: float
    atol: float
    reason: str


FLOAT32 = Tolerance(1e-5, 1e-6, "float32 sums taken in another order, a few steps long")
# Adam and its kin divide a gradient by the root of its own square: near zero, where a component's
# terms cancel, the quotient keeps the relative error of a difference of nearly equal numbers.
ADAPTIVE = Tolerance(1e-4, 2e-5, "division by sqrt(v) magnifies float32 rounding")
NORMAL = Tolerance(
    1e-4, 1e-5, "division by the root of a small batch's variance magnifies rounding"
)
# 8 bits of mantissa: one rounding is 2**-9 = 2e-3 relative, and a replica rounds its own partial
# sums; several steps add up.
BFLOAT16 = Tolerance(4e-2, 4e-2, "bfloat16 has 8 bits of mantissa")
# 11 bits of mantissa: one rounding is 2**-12 = 2.4e-4 relative.
FLOAT16 = Tolerance(1e-2, 1e-2, "float16 has 11 bits of mantissa")


def flatten(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(path, leaf) in a fixed order; a History is its dict of lists."""
    if type(value).__name__ == "History":
        value = {"history": value.history, "epoch": value.epoch}
    if isinstance(value, dict):
        for key in sorted(value, key=str):
            yield from flatten(value[key], f"{path}/{key}")
    elif isinstance(value, (list, tuple)):
        yield f"{path}#", len(value)
        for index, item in enumerate(value):
            yield from flatten(item, f"{path}[{index}]")
    else:
        yield path, value


def largest_difference(expected: Any, actual: Any, tolerance: Tolerance) -> float:
    """The largest absolute difference; raises AssertionError where it is out of the tolerance."""
    ours, theirs = list(flatten(actual)), list(flatten(expected))
    if [path for path, _ in theirs] != [path for path, _ in ours]:
        missing = [path for path, _ in theirs if path not in dict(ours)]
        extra = [path for path, _ in ours if path not in dict(theirs)]
        raise AssertionError(f"another structure: missing {missing[:8]}, unexpected {extra[:8]}")
    largest, wrong = 0.0, []
    for (path, one), (_, other) in zip(theirs, ours, strict=True):
        difference, complaint = _leaf(one, other, tolerance)
        largest = max(largest, difference)
        if complaint:
            wrong.append(f"{path}: {complaint}")
    if wrong:
        raise AssertionError(
            f"{len(wrong)} of {len(ours)} values differ (rtol {tolerance.rtol:g}, atol "
            f"{tolerance.atol:g}: {tolerance.reason}):\n  " + "\n  ".join(wrong[:12])
        )
    return largest


def _leaf(expected, actual, tolerance) -> tuple[float, str]:
    if isinstance(expected, str) and isinstance(actual, str) and expected != actual:
        pairs = zip(expected, actual, strict=False)
        start = max(0, sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)) - 20)
        texts = (text[start : start + 160] for text in (expected, actual))
        return 0.0, "expected {!r}, received {!r}, from character {}".format(*texts, start)
    if isinstance(expected, (str, bytes, bool, type(None))):
        return 0.0, "" if expected == actual else f"expected {expected!r}, received {actual!r}"
    one, other = np.asarray(expected), np.asarray(actual)
    if one.shape != other.shape:
        return 0.0, f"expected shape {one.shape}, received {other.shape}"
    arrays = isinstance(expected, np.ndarray) and isinstance(actual, np.ndarray)
    if arrays and one.dtype != other.dtype:
        return 0.0, f"expected dtype {one.dtype}, received {other.dtype}"
    if one.dtype.kind not in "fiubV":
        return 0.0, "" if np.array_equal(one, other) else f"expected {one!r}, received {other!r}"
    one, other = one.astype("float64"), other.astype("float64")
    if not one.size:
        return 0.0, ""
    with np.errstate(invalid="ignore"):
        differences = np.where(one == other, 0.0, np.abs(one - other))
    both_nan = np.isnan(one) & np.isnan(other)
    differences = np.where(both_nan, 0.0, differences)
    # Infinite is right only where it is expected: it must not widen the tolerance to infinity.
    magnitude = np.where(np.isfinite(one), np.abs(one), 0.0)
    outside = ~(differences <= tolerance.atol + tolerance.rtol * magnitude)
    worst = float(np.nanmax(np.where(np.isfinite(differences), differences, 0.0)))
    if not outside.any():
        return worst, ""
    beyond = np.where(np.isnan(differences), math.inf, differences) - tolerance.rtol * magnitude
    at = int(np.argmax(beyond))
    where = f" at {np.unravel_index(at, one.shape)}" if one.ndim else ""
    return worst, (
        f"expected {one.flat[at]:.8g}, received {other.flat[at]:.8g}{where}"
        f" (difference {differences.flat[at]:.3g}, {int(outside.sum())} of {one.size} values)"
    )


class Checks:
    """What the labs of all suites have: where a case runs, what it found, and assertions."""

    def __init__(self, backend: str, replicas: int):
        self.backend = backend
        self.replicas = replicas
        self.difference = 0.0
        self.tolerances: set[str] = set()

    @property
    def devices(self) -> list[str]:
        return [f"{KIND}:{index}" for index in range(self.replicas)]

    def check(self, condition: Any, complaint: str) -> None:
        """An assertion that survives ``python -O`` and says what it is about."""
        if not condition:
            raise AssertionError(complaint)

    @contextlib.contextmanager
    def told(self, part: str) -> Iterator[list[str]]:
        said: list[str] = []
        with warnings.catch_warnings():
            show = warnings.showwarning
            warnings.simplefilter("always")
            warnings.showwarning = lambda message, *where, **options: (
                said.append(str(message))
                if part in str(message)
                else show(message, *where, **options)
            )
            yield said

    @contextlib.contextmanager
    def raises(self, kinds: Any, pattern: str) -> Iterator[None]:
        """The error says what was expected, what came, what to do: ``pattern`` names its gist."""
        try:
            yield
        except kinds as error:
            if not re.search(pattern, str(error), re.IGNORECASE | re.DOTALL):
                raise AssertionError(
                    f"the error's message should match {pattern!r}, received: {error}"
                ) from error
            return
        raise AssertionError(f"expected an error that matches {pattern!r}, none came")
