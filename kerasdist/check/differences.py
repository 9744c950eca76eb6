"""Measures how the replicas' results differ from one device's, and whether by rounding alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

# For each type in which layers compute: by how much two sums of the same terms in different order
# may differ, relative to the size of the terms. Code that mixes examples causes differences of
# several percent, rarely less than a thousandth. The tolerance of float64 is large, because metrics
# and sample weights may be float32 even if the model is float64.
_TOLERANCES = {"float64": 1e-5, "float32": 1e-3, "float16": 2e-2, "bfloat16": 1e-1}
# For each type: the relative distance between neighbouring numbers.
_EPSILONS = {"float64": 2e-16, "float32": 1.2e-7, "float16": 1e-3, "bfloat16": 8e-3}
# The difference of a gradient is divided by the norm of that gradient, and the difference of a
# variable's change by the norm of that change. The divisor is at least this fraction of the norm of
# the largest gradient or change in the step.
_LEAST_PART = 1e-2
# A difference counts only if it is `_TIMES_ROUNDING` times as large as the effect of rounding. To
# measure this effect, the step is repeated on one device, with weights that are changed by a few
# rounding errors. If the compared steps draw different random numbers, the repetitions also draw
# new ones. Their effect is larger, so a difference need only be `_TIMES_DRAWS` times as large.
_TIMES_ROUNDING = 30.0
_TIMES_DRAWS = 10.0


@dataclass(frozen=True)
class Difference:
    """One quantity of a step: its values on one device and under the strategy.

    Attributes:
        name: The name of a log (the loss or a metric), the path of a variable, or the number of an
            output of the model, as in ``output 0``.
        expected: The value on one device: a number; for an array, the element that differs most.
        received: The value under the strategy, for the same number or element.
        absolute: The absolute difference; for an array, that of the element that differs most.
        relative: The difference relative to the size of the quantity; for an array, the norm of the
            difference divided by the norm of the array.
        tolerance: The largest `relative` that rounding can cause.
    """

    name: str
    expected: float
    received: float
    absolute: float
    relative: float
    tolerance: float

    @property
    def is_more_than_rounding(self) -> bool:
        """Whether the difference is too large for rounding."""
        return not self.relative <= self.tolerance

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.expected:.7g} on one device, {self.received:.7g} under the "
            f"strategy ({self.relative:.2g} of its size)"
        )


@dataclass(frozen=True)
class StepResult:
    """The results of one training step, as NumPy arrays.

    Attributes:
        logs: The logs that the step reported, by name.
        gradients: The gradients that the optimizers got, by path of the variable. If a step calls
            optimizers several times, the keys of the second and later calls have the number of the
            call before the path.
        weights: The changes of trainable variables, by path.
        statistics: The changes of other variables, by path.
        sizes: The norms of all variables before the step, by path.
        outputs: The outputs of the model's first call, by the replica's number. For a step on one
            device, the only key is None.
    """

    logs: Mapping[str, Any]
    gradients: Mapping[str, Any]
    weights: Mapping[str, Any]
    statistics: Mapping[str, Any]
    sizes: Mapping[str, float]
    outputs: Mapping[int | None, Sequence[Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Precision:
    """The size of rounding errors in a model.

    Attributes:
        tolerance: The largest relative difference that counts as rounding.
        epsilon: The relative distance of neighbouring numbers of the coarsest type in the model.
        tolerance_of_gradients: The largest relative difference of gradients that counts as
            rounding.
    """

    tolerance: float
    epsilon: float
    tolerance_of_gradients: float

    @classmethod
    def of(cls, dtypes: Iterable[str], travelling: str | None = None) -> Precision:
        """Returns the precision of the coarsest of the types `dtypes`.

        `travelling` is the type in which replicas send gradients; None if they do not convert them.
        """
        known = [dtype for dtype in dtypes if dtype in _TOLERANCES] or ["float32"]
        tolerance = max(_TOLERANCES[dtype] for dtype in known)
        of_gradients = tolerance if travelling is None else _TOLERANCES[travelling]
        epsilon = max(_EPSILONS[dtype] for dtype in known)
        return cls(tolerance, epsilon, max(tolerance, of_gradients))


class Differences(NamedTuple):
    """All differences of a step, by kind.

    Attributes:
        logs: The differences of the loss and the metrics.
        gradients: The differences of the gradients.
        weights: The differences of the changes of trainable variables.
        statistics: The differences of the changes of other variables.
        outputs: The differences of the model's outputs.
    """

    logs: Sequence[Difference] = ()
    gradients: Sequence[Difference] = ()
    weights: Sequence[Difference] = ()
    statistics: Sequence[Difference] = ()
    outputs: Sequence[Difference] = ()

    @property
    def deciding(self) -> list[Difference]:
        """The differences that decide whether the step equals the step on one device."""
        named = [replace(one, name=f"change of {one.name}") for one in self.weights]
        return [*self.logs, *self.gradients, *self.statistics, *named]


def differences(expected: StepResult, received: StepResult, precision: Precision) -> Differences:
    """Returns all differences between two steps."""
    # A variable's change in a step is its new value minus its old value. Both values are rounded in
    # proportion to their size, so a small change of a large variable has a large relative error. To
    # allow for this error, the difference between two steps' changes of a variable is divided by at
    # least `rounded` times the norm of the variable.
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
    """Returns the changes of weights under the strategy, to compare them with those on one device.

    The first step of Adam has the size of the learning rate, even if a gradient is tiny. So the
    changes of an element are compared only if its gradients in both steps are equal, up to
    `tolerance` times the gradient. Any other element gets the change on one device instead, so that
    it does not count as a difference.
    """
    weights = dict(received.weights)
    for name, gradient in expected.gradients.items():
        path = name.rpartition(", ")[2]
        other = received.gradients.get(name)
        change, known = weights.get(path), expected.weights.get(path)
        if change is None or known is None:
            continue
        if other is None or not gradient.shape == other.shape == change.shape == known.shape:
            weights[path] = known  # the comparison of the gradients shows the difference
            continue
        with np.errstate(all="ignore"):
            same = np.abs(gradient - other) <= tolerance * np.abs(gradient)
        weights[path] = np.where(same, change, known)
    return weights


def beyond(
    found: Iterable[Difference], chance: Iterable[Difference], *, draws_differ: bool
) -> list[Difference]:
    """Returns the differences in `found` that neither rounding nor other random numbers explain.

    `chance` has the differences between repetitions of the step on one device.
    """
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
    """Returns the difference between two arrays.

    The norm of the difference is divided by the larger of the norms of the two arrays, or by
    `least_size` if that is more.
    """
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
    """Returns the difference with the largest `relative`, None if `found` is empty."""
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
        # A variable may have a gradient in only one of the two steps. In the other step, the
        # gradient counts as zero.
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
