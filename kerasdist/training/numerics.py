"""The arithmetic of contract C1, for the backends on which each replica runs its own program.

User code stays as if written for one device, so a replica's loss is a mean over its own examples.
Replica ``r`` holds ``n_r`` of the ``N`` examples of the global batch. Everything here serves one
equation::

    global loss = sum over r of w_r * loss_r,    w_r = n_r / N

Gradients are combined with the same weights (`weighted`), so they are the global loss's. A mean
over all examples and a term that does not depend on the batch satisfy the equation as they are. A
loss with another divisor ``d_r`` (valid steps of a mask, a sum of sample weights) is scaled by
``(d_r / D) / w_r``, ``D`` the sum of all ``d_r``; a sum is scaled by ``1 / w_r``
(`global_share_of_loss`). docs/numerics.md derives it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kerasdist import keras_seam
from kerasdist.keras_seam import ops
from kerasdist.replica_context import ReplicaContext

_MEANS = ("sum_over_batch_size", "mean")
_WEIGHTED_MEAN = "mean_with_sample_weight"


def weighted(gradient: Any, weight: Any) -> Any:
    """Returns a gradient times a replica's weight: zero, even if it is NaN, where the weight is 0.

    Args:
        gradient: A tensor.
        weight: The replica's weight, a float, or a scalar tensor where it is known in the step
            only.
    """
    if isinstance(weight, float):
        return gradient * weight
    weight = ops.cast(weight, gradient.dtype)
    return ops.where(weight > 0, gradient, ops.zeros_like(gradient)) * weight


def is_weighed_by_loss(optimizer: Any) -> bool:
    """Returns whether the loss, not the gradients, gets the weight where a loss is scaled.

    Args:
        optimizer: A Keras optimizer.
    """
    return isinstance(optimizer, keras_seam.LossScaleOptimizer)


def weight_of_gradients(optimizer: Any, weight: Any) -> Any:
    """Returns the weight that a replica's gradients still lack.

    Args:
        optimizer: A Keras optimizer. The loss that a LossScaleOptimizer scaled had the weight
            already, where `Collectives.weighs_scaled_losses`.
        weight: The replica's weight.
    """
    # Still zero where there is no example: such gradients may be NaN.
    return presence(weight) if is_weighed_by_loss(optimizer) else weight


def presence(weight: Any) -> Any:
    """Returns 1 for a replica that has examples, 0 for one without.

    Args:
        weight: The replica's weight.
    """
    return float(weight > 0) if isinstance(weight, float) else ops.cast(weight > 0, weight.dtype)


def per_weight(value: Any, weight: Any) -> Any:
    """Returns ``value / weight``, and 0 where the weight is 0.

    Args:
        value: A tensor: a sum over a replica's examples.
        weight: The replica's weight.
    """
    if isinstance(weight, float):
        return value / weight
    return ops.divide_no_nan(value, ops.cast(weight, value.dtype))


def global_share_of_loss(
    reduce: Callable[..., Any],
    replica: ReplicaContext,
    values: Any,
    *,
    sample_weight: Any,
    mask: Any,
    reduction: str | None,
    dtype: Any,
) -> Any:
    """Reduces a Keras loss so that the weighted mean over the replicas is the loss of one device.

    All replicas must call it: some reductions need the sum of the divisors.

    Args:
        reduce: Keras's own reduction.
        replica: The replica whose loss this is.
        values: Loss a example or step, shape ``(n, ...)``; or a scalar, which is taken for a mean.
        sample_weight: As Keras's.
        mask: As Keras's.
        reduction: One of Keras's reductions.
        dtype: As Keras's.

    Returns:
        What `reduce` returns, scaled.
    """
    values = ops.convert_to_tensor(values, dtype=dtype)

    def reduced(how: str | None) -> Any:
        return reduce(values, sample_weight=sample_weight, mask=mask, reduction=how, dtype=dtype)

    if reduction in (None, "none") or len(values.shape) == 0:
        return reduced(reduction)
    # All weights of a replica may be zero, and 0 / 0 has the gradient NaN on PyTorch before Keras
    # 3.15. So the sum is divided, and once, by the weights of all replicas.
    divides_sum = reduction == _WEIGHTED_MEAN and not (sample_weight is None and mask is None)
    loss = reduced("sum" if divides_sum else reduction)
    if len(loss.shape) > 0:
        loss = ops.sum(loss)  # Keras leaves the losses of no example unreduced: shape (0,)
    weight = replica.weight
    if reduction == "sum":
        return per_weight(loss, weight)
    divisor = _own_divisor(sample_weight, mask, reduction, loss.dtype)
    if divisor is None:
        return loss
    [total] = replica.collectives.all_sum([divisor])
    if divides_sum:
        return per_weight(ops.divide_no_nan(loss, total), weight)
    return per_weight(loss * ops.divide_no_nan(divisor, total), weight)


def _own_divisor(sample_weight: Any, mask: Any, reduction: str, dtype: Any) -> Any:
    """What this replica divides by, where that is not in proportion to its number of examples."""
    if reduction in _MEANS:
        return None if mask is None else ops.sum(ops.cast(mask, dtype))
    if sample_weight is None and mask is None:
        return None
    if sample_weight is not None:
        sample_weight = ops.convert_to_tensor(sample_weight, dtype=dtype)
    if mask is not None:
        mask = ops.convert_to_tensor(mask, dtype=dtype)
    merged = keras_seam.apply_mask(sample_weight, mask, dtype=dtype, reduction=reduction)
    return ops.stop_gradient(ops.sum(ops.cast(merged, dtype)))
