"""Measures how replicas' results differ from one device's, and whether rounding explains it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields, replace
from typing import Any

import numpy as np

# By the type in which layers compute: how far two orders of a sum may differ, relative to the size
# of its terms. Code that mixes examples is off by percents, seldom by less than a thousandth.
# (Of a float64 model, metrics and the weights of examples may still be float32.)
_TOLERANCES = {"float64": 1e-5, "float32": 1e-3, "float16": 2e-2, "bfloat16": 1e-1}
# The smallest relative difference between two numbers of that type.
_EPSILONS = {"float64": 2e-16, "float32": 1.2e-7, "float16": 1e-3, "bfloat16": 8e-3}
# A gradient or change is measured against at least this part of the largest one.
_LEAST_PART = 1e-2
# A difference is more than rounding if it is this many times the effect of changing all variables
# by a few roundings on one device. Draws that differ have a larger effect, of which three samples
# are known.
_TIMES_ROUNDING = 30.0
_TIMES_DRAWS = 10.0


@dataclass(frozen=True)
class Difference:
    """One quantity of a step, as one device and as the strategy computes it.

    Attributes:
        name: A metric's name, a variable's path or a layer's name.
        expected: What one device computes: a number; of an array, the element that differs most.
        received: What the strategy computes for the same number or element.
        absolute: The largest absolute difference.
        relative: The difference relative to the size of the quantity: of an array the norm of the
            difference, divided by that of the array.
        tolerance: How large `relative` may be by rounding.
    """

    name: str
    expected: float
    received: float
    absolute: float
    relative: float
    tolerance: float

    @property
    def is_more_than_rounding(self) -> bool:
        """Whether rounding cannot explain the difference."""
        return not self.relative <= self.tolerance

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.expected:.7g} on one device, {self.received:.7g} under the "
            f"strategy ({self.relative:.2g} of its size)"
        )


@dataclass(frozen=True)
class StepResult:
    """What one training step computed, as NumPy arrays.

    Attributes:
        logs: What the step reported, by name.
        gradients: The gradients that the optimizers got, by path.
        weights: How trainable variables changed, by path.
        statistics: How other variables changed, by path.
        sizes: The norms of all variables before the step, by path.
    """

    logs: Mapping[str, Any]
    gradients: Mapping[str, Any]
    weights: Mapping[str, Any]
    statistics: Mapping[str, Any]
    sizes: Mapping[str, float]


@dataclass(frozen=True)
class Precision:
    """The size of rounding errors in a model.

    Attributes:
        tolerance: The largest relative difference that is taken for rounding.
        epsilon: The relative distance of neighbouring numbers.
        tolerance_of_gradients: As `tolerance`, for gradients.
    """

    tolerance: float
    epsilon: float
    tolerance_of_gradients: float

    @classmethod
    def of(cls, dtypes: Iterable[str], travelling: str | None = None) -> Precision:
        """Returns the precision of the coarsest type."""
        known = [dtype for dtype in dtypes if dtype in _TOLERANCES] or ["float32"]
        tolerance = max(_TOLERANCES[dtype] for dtype in known)
        of_gradients = tolerance if travelling is None else _TOLERANCES[travelling]
        epsilon = max(_EPSILONS[dtype] for dtype in known)
        return cls(tolerance, epsilon, max(tolerance, of_gradients))


@dataclass(frozen=True)
class Differences:
    """All differences of a step, by kind.

    Attributes:
        logs: The loss and the metrics.
        gradients: The gradients.
        weights: The changes of the trainable variables.
        statistics: The changes of the others.
        outputs: The model's outputs.
    """

    logs: Sequence[Difference] = ()
    gradients: Sequence[Difference] = ()
    weights: Sequence[Difference] = ()
    statistics: Sequence[Difference] = ()
    outputs: Sequence[Difference] = ()

    @property
    def deciding(self) -> list[Difference]:
        """Returns the differences that decide whether a step is that of one device."""
        named = [replace(one, name=f"change of {one.name}") for one in self.weights]
        return [*self.logs, *self.gradients, *self.statistics, *named]

    def as_numbers(self) -> list[list[tuple[Any, ...]]]:
        """Returns the differences as lists of strings and numbers, which `of_numbers` decodes."""
        return [[astuple(one) for one in getattr(self, kind.name)] for kind in fields(self)]

    @classmethod
    def of_numbers(cls, numbers: Iterable[Iterable[Iterable[Any]]]) -> Differences:
        """Returns the differences that `as_numbers` has encoded."""
        return cls(*([Difference(*row) for row in kind] for kind in numbers))


def differences(expected: StepResult, received: StepResult, precision: Precision) -> Differences:
    """Returns how two steps differ."""
    # A variable's change is a difference of two values, each rounded in proportion to its size.
    rounded = 10 * precision.epsilon / precision.tolerance
    least = {name: rounded * size for name, size in expected.sizes.items()}
    usual, of_gradients = precision.tolerance, precision.tolerance_of_gradients
    weights = _without_rounded(expected, received, of_gradients)
    return Differences(
        _of_all(expected.logs, received.logs, usual, {}, 0.0),
        _of_all(expected.gradients, received.gradients, of_gradients, {}, _LEAST_PART),
        _of_all(expected.weights, weights, usual, least, _LEAST_PART),
        _of_all(expected.statistics, received.statistics, usual, least, 0.0),
    )


def _without_rounded(
    expected: StepResult, received: StepResult, tolerance: float
) -> dict[str, Any]:
    """Returns the received changes of weights, the expected ones where a rounding decides.

    Adam's first step has the size of the learning rate, however small a gradient is. So an element
    counts whose gradient is the same on both sides, measured by its own size.
    """
    weights = dict(received.weights)
    for name, gradient in expected.gradients.items():
        path = name.rpartition(", ")[2]
        other = received.gradients.get(name)
        change, known = weights.get(path), expected.weights.get(path)
        if change is None or known is None:
            continue
        if other is None or not gradient.shape == other.shape == change.shape == known.shape:
            weights[path] = known  # the gradients decide
            continue
        with np.errstate(all="ignore"):
            same = np.abs(gradient - other) <= tolerance * np.abs(gradient)
        weights[path] = np.where(same, change, known)
    return weights


def beyond(
    found: Iterable[Difference], chance: Iterable[Difference], *, draws_differ: bool
) -> list[Difference]:
    """Returns the differences that neither rounding nor draws that differ explain."""
    times = _TIMES_DRAWS if draws_differ else _TIMES_ROUNDING
    by_chance: dict[str, float] = {}
    for one in chance:
        by_chance[one.name] = max(by_chance.get(one.name, 0.0), one.relative)
    return [
        one
        for one in found
        if one.is_more_than_rounding and not one.relative <= times * by_chance.get(one.name, 0.0)
    ]


def difference(
    name: str, expected: object, received: object, tolerance: float, least_size: float = 0.0
) -> Difference:
    """Returns how two arrays differ."""
    one, other = np.asarray(expected, "float64"), np.asarray(received, "float64")
    if one.shape != other.shape:
        return Difference(name, np.nan, np.nan, np.inf, np.inf, tolerance)
    if not one.size:
        return Difference(name, 0.0, 0.0, 0.0, 0.0, tolerance)
    with np.errstate(all="ignore"):
        gaps = np.where(
            (one == other) | (np.isnan(one) & np.isnan(other)), 0.0, np.abs(one - other)
        )
        gaps = np.where(np.isnan(gaps), np.inf, gaps)
        norm = float(np.linalg.norm(gaps))
        size = max(_norm(one), _norm(other), least_size)
    at = np.unravel_index(int(np.argmax(gaps)), gaps.shape)
    relative = 0.0 if norm == 0 else norm / size if np.isfinite(norm) and size > 0 else np.inf
    return Difference(
        name, float(one[at]), float(other[at]), float(gaps[at]), float(relative), tolerance
    )


def worst(found: Iterable[Difference]) -> Difference | None:
    """Returns the largest of some differences, None if there is none."""
    return max(found, key=lambda one: one.relative, default=None)


def _of_all(
    expected: Mapping[str, Any],
    received: Mapping[str, Any],
    tolerance: float,
    least: Mapping[str, float],
    part: float,
) -> list[Difference]:
    largest = max((_norm(value) for value in expected.values()), default=0.0)
    found = []
    for name in {**expected, **received}:
        # A variable may have no gradient on one side.
        one = expected[name] if name in expected else np.zeros_like(received[name])
        other = received[name] if name in received else np.zeros_like(one)
        if _is_numeric(one) and _is_numeric(other):
            size = max(part * largest, least.get(name, 0.0))
            found.append(difference(name, one, other, tolerance, size))
    return found


def _norm(value: object) -> float:
    values = np.asarray(value, "float64")
    return float(np.linalg.norm(values[np.isfinite(values)]))


def _is_numeric(value: object) -> bool:
    return np.asarray(value).dtype.kind in "biuf"
