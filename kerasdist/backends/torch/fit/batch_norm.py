"""Batch normalization with fewer passes over memory.

Keras computes batch normalization by elementary operations, and torch differentiates each of them.
These operations need about twenty passes over the memory, while on GPUs torch's own function needs
four. But in training torch's function would compute the statistics from its own inputs, while the
statistics may have to come from the global batch. So `Moments`, an autograd function, computes the
statistics, also on CPUs. Torch's function then gets the statistics as arguments, as in inference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch.nn import functional

from kerasdist import keras_compat
from kerasdist.backends.torch import internals
from kerasdist.core.context import current
from kerasdist.training.batch_norm import combined

_DEVICE = "cuda"


@cache
def install() -> None:
    """Installs the hook into Keras's normalization, once per process."""
    keras_compat.install(nn_normalization=_normalized)


def moments(inputs: torch.Tensor, axes: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Returns mean and variance of each channel; None for inputs that `rows_of` excludes."""
    rows = rows_of(inputs, axes)
    return None if rows is None else Moments.apply(rows, None, "")


def rows_of(inputs: torch.Tensor, axes: Sequence[int]) -> torch.Tensor | None:
    """Returns inputs as a matrix with a column per channel; None if `Moments` cannot take them.

    `Moments` takes float32 inputs on a CPU or on CUDA, averaged over all axes except the last, in
    code that is neither compiled nor transformed by ``torch.func``. Either all replicas get None or
    no replica does, even if some replicas have no rows.
    """
    kind = inputs.device.type
    if (
        inputs.dtype is not torch.float32
        or inputs.ndim == 1
        or [*axes] != [*range(inputs.ndim - 1)]
        or kind not in ("cpu", _DEVICE)
        or torch.compiler.is_compiling()
        or internals.ARE_TRANSFORMS_ACTIVE.value()
    ):
        return None
    return inputs.reshape(-1, inputs.shape[-1]).contiguous()


def _moments_of(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns mean and variance of each column; zeros if there are no rows."""
    if not len(rows):
        return rows.new_zeros(rows.shape[1]), rows.new_zeros(rows.shape[1])
    if rows.device.type == _DEVICE:
        variance, mean = torch.var_mean(rows, 0, correction=0)
        return mean, variance
    mean = rows.mean(0)  # on CPUs `var_mean` takes ten times as long
    return mean, (rows - mean).square_().mean(0)


def _moments_of_all(of_replicas: torch.Tensor) -> torch.Tensor:
    """Combines counts, means and variances (along axis 1) of all replicas (along axis 0)."""
    counts, means, variances = of_replicas.unbind(1)
    mean, variance = combined(counts, means, counts * variances, added=0.0)
    return torch.stack([counts.sum(0), mean, variance])


def _gradient_of_rows(
    rows: torch.Tensor, mean: torch.Tensor, slope: torch.Tensor, offset: torch.Tensor
) -> torch.Tensor:
    """Returns ``slope * (rows - mean) + offset``, in few passes over memory."""
    if torch.is_grad_enabled():  # with create_graph=True, the gradient must be differentiable
        return slope * (rows - mean) + offset
    if rows.device.type == _DEVICE and len(rows):
        ones = torch.ones_like(mean)
        return functional.batch_norm(rows, mean, ones, slope, offset, eps=0.0)
    return (rows - mean).mul_(slope).add_(offset)


class Moments(torch.autograd.Function):
    """Computes mean and variance of each column, over the rows of one or all replicas."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, replica: Any, label: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns mean and variance of `rows`, or of all replicas' rows if a replica is given."""
        mean, variance = _moments_of(rows)
        count: Any = len(rows)
        if replica is not None:
            replica.scope.sums_in_backward |= any(ctx.needs_input_grad)
            own = torch.stack([torch.full_like(mean, count), mean, variance])
            count, mean, variance = replica.combine(label, own, _moments_of_all).unbind()
        ctx.replica, ctx.label, ctx.count = replica, label, count
        ctx.save_for_backward(rows, mean)
        return mean, variance

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        """Returns the gradient with respect to this replica's rows."""
        rows, mean = ctx.saved_tensors
        both = torch.stack(gradients)
        if ctx.replica is not None:
            both = ctx.replica.sum_gradient(ctx.label, both)
        of_mean, of_variance = both / ctx.count
        return _gradient_of_rows(rows, mean, 2 * of_variance, of_mean), None, None


def _normalized(  # noqa: PLR0917  Keras's parameters
    original: Callable[..., torch.Tensor],
    x: torch.Tensor,
    mean: torch.Tensor,
    variance: torch.Tensor,
    axis: int,
    offset: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    epsilon: float = 1e-3,
) -> torch.Tensor:
    channels = [one for one in (mean, variance, offset, scale) if one is not None]
    is_last = axis in (-1, x.ndim - 1)
    if not is_last or current.replica is None or not _serves(x, channels):
        return original(x, mean, variance, axis, offset, scale, epsilon)
    # Torch's function computes no gradients for the mean and the variance, so it gets these two as
    # constants. The scale and the offset that it gets are computed from the mean and the variance,
    # so gradients flow to mean and variance through the scale and the offset.
    inverse, fixed = (variance + epsilon).rsqrt(), mean.detach()
    slope = inverse if scale is None else scale * inverse
    begin = (fixed - mean) * slope
    rows = functional.batch_norm(
        x.reshape(-1, x.shape[-1]),
        fixed,
        variance.detach(),
        slope / inverse.detach(),
        begin if offset is None else begin + offset,
        eps=epsilon,
    )
    return rows.view_as(x)


def _serves(inputs: torch.Tensor, channels: Sequence[torch.Tensor]) -> bool:
    """Returns whether torch's own function is used: for float32 on GPUs, in uncompiled code."""
    for one in (inputs, *channels):
        if not isinstance(one, torch.Tensor) or one.dtype is not torch.float32:
            return False
        if one.device.type != _DEVICE:
            return False
    # Compiled code keeps Keras's own operations, because the compiler fuses them.
    return inputs.ndim > 1 and inputs.numel() > 0 and not torch.compiler.is_compiling()
