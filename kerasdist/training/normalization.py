"""Mean and variance of the global batch, for BatchNormalization, in one all-gather.

Each replica sends its number of values, their mean and their variance; all combine them the same
way (Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample
variances", 1979). That loses no digits where the mean is large against the deviation, as a sum of
squares would, and an empty replica counts for nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import keras

from kerasdist.backends.base.collectives import Collectives
from kerasdist.keras_compat import ops


def global_moments(
    collectives: Collectives, inputs: object, axes: Sequence[int], mask: object
) -> tuple[Any, Any]:
    """Returns mean and variance over the rows of all replicas, with their gradient.

    All replicas must call it.
    """
    own = _own_moments(collectives, inputs, axes) if mask is None else None
    if own is None:
        count, mean, squares = _of_some(inputs, axes, mask)
    else:
        mean, variance = own
        # Made on the device: copying a number there would make the host wait for it.
        count = ops.ones_like(mean) * _number(inputs, axes)
        squares = variance * count

    # One row per replica: count, mean and sum of squares, with one value per channel each.
    flat = [
        ops.reshape(part, (-1,))
        for part in (ops.broadcast_to(count, ops.shape(mean)), mean, squares)
    ]
    rows = collectives.all_stack(ops.stack(flat))
    return combined(rows[:, 0], rows[:, 1], rows[:, 2], added_to_count(mask))


def added_to_count(mask: object) -> float:
    """Returns what Keras adds to the count by which it divides: epsilon with a mask, else zero."""
    return 0.0 if mask is None else keras.config.epsilon()


def combined(counts: Any, means: Any, squares: Any, added: float) -> tuple[Any, Any]:
    """Returns the mean and the variance of all replicas' values together.

    Args:
        counts: The number of values of each replica; replicas along axis 0, as in all of these.
        means: Their means.
        squares: Their sums of squared deviations from these means.
        added: What is added to the count of all.
    """
    divisor = ops.sum(counts, 0) + added
    global_mean = ops.sum(counts * means, 0) / divisor
    spread = squares + counts * ops.square(means - global_mean)
    return global_mean, ops.sum(spread, 0) / divisor


def _own_moments(
    collectives: Collectives, inputs: object, axes: Sequence[int]
) -> tuple[Any, Any] | None:
    """Returns mean and variance of the replica's rows; None if there may be none."""
    kernel = collectives.own_moments
    found = kernel and kernel(inputs, axes)
    if found or not all(_is_positive(ops.shape(inputs)[axis]) for axis in axes):
        return found
    # One operation each, which saves time where steps are not compiled.
    return ops.reshape(ops.mean(inputs, axes), (-1,)), ops.reshape(ops.var(inputs, axes), (-1,))


def _is_positive(size: object) -> bool:
    """Returns whether a size is known before the step runs, and not zero."""
    return isinstance(size, int) and size > 0


def _of_some(inputs: Any, axes: Sequence[int], mask: Any) -> tuple[Any, Any, Any]:
    """Returns count, mean and sum of squares where a mask or an empty replica is possible."""
    if mask is None:
        count = _count(inputs, axes)
        weights = None
        total = ops.sum(inputs, axes, keepdims=True)
    else:
        weights = ops.cast(
            ops.broadcast_to(ops.expand_dims(mask, -1), ops.shape(inputs)), inputs.dtype
        )
        count = ops.sum(weights, axes, keepdims=True)
        total = ops.sum(ops.where(weights > 0, inputs, 0), axes, keepdims=True)
    mean = total / ops.maximum(count, 1)
    deviation = inputs - mean
    if weights is not None:
        deviation = ops.where(weights > 0, deviation, 0)
    return count, mean, ops.sum(ops.square(deviation), axes, keepdims=True)


def _count(inputs: Any, axes: Sequence[int]) -> Any:
    """Returns the number of values per channel, as a tensor of as many dimensions."""
    return ops.reshape(ops.cast(_number(inputs, axes), inputs.dtype), (1,) * len(inputs.shape))


def _number(inputs: Any, axes: Sequence[int]) -> Any:
    """Returns the number of values per channel: an int, or a scalar for a dynamic shape."""
    number = math.prod([ops.shape(inputs)[axis] for axis in axes])
    return number if isinstance(number, int) else ops.cast(number, inputs.dtype)
