"""Batch normalization with fewer passes over memory.

Keras computes batch normalization by elementary operations, and torch differentiates each of them.
These operations need about twenty passes over the memory, while on GPUs the kernels of
``torch.nn.SyncBatchNorm`` need four. The layers of torch compute the statistics themselves, but
here the statistics may come from the global batch. Therefore there are two functions: `_Moments`
computes the statistics, on CPUs too, and `_Normalized` normalizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from kerasdist import keras_compat
from kerasdist.backends.torch import private
from kerasdist.core.context import current

_DEVICE = "cuda"


@cache
def install() -> None:
    """Installs the hook into Keras, once per process."""
    keras_compat.install(nn_normalization=_normalized)


def moments(inputs: torch.Tensor, axes: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Returns mean and variance of each channel; None for inputs that `rows_of` does not take."""
    rows = rows_of(inputs, axes)
    if rows is None:
        return None
    mean, variance = _Moments.apply(rows)
    return mean, variance


def rows_of(inputs: torch.Tensor, axes: Sequence[int]) -> torch.Tensor | None:
    """Returns float32 inputs as a matrix with a column per channel; None for other inputs.

    Whether the result is None is equal on all replicas, also on one that has no rows.
    """
    kind = inputs.device.type
    if (
        inputs.dtype is not torch.float32
        or inputs.ndim == 1
        or [*axes] != [*range(inputs.ndim - 1)]
        or not (kind == "cpu" or (kind == _DEVICE and private.can_fuse_batch_norm()))
        or torch.compiler.is_compiling()
    ):
        return None
    return inputs.reshape(-1, inputs.shape[-1]).contiguous()


def moments_of(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns mean and variance of each column; zeros if there are no rows."""
    if not len(rows):
        return rows.new_zeros(rows.shape[1]), rows.new_zeros(rows.shape[1])
    if rows.device.type == _DEVICE:
        variance, mean = torch.var_mean(rows, 0, correction=0)
        return mean, variance
    mean = rows.mean(0)  # on CPUs `var_mean` takes ten times as long
    return mean, (rows - mean).square_().mean(0)


def gradient_of_rows(
    rows: torch.Tensor, mean: torch.Tensor, slope: torch.Tensor, offset: torch.Tensor
) -> torch.Tensor:
    """Returns ``slope * (rows - mean) + offset``, in few passes over memory."""
    if torch.is_grad_enabled():  # with create_graph=True torch differentiates this pass
        return slope * (rows - mean) + offset
    if rows.device.type == _DEVICE and len(rows):
        return torch.batch_norm_elemt(rows, slope, offset, mean, torch.ones_like(mean), 0.0)
    return (rows - mean).mul_(slope).add_(offset)


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
    offset = torch.zeros_like(mean) if offset is None else offset
    scale = torch.ones_like(mean) if scale is None else scale
    rows = x.reshape(-1, x.shape[-1])
    return _Normalized.apply(rows, epsilon, mean, variance, scale, offset).view_as(x)


def _serves(inputs: torch.Tensor, channels: Sequence[torch.Tensor] = ()) -> bool:
    """Returns whether torch's kernels apply: on GPUs, to contiguous float32 rows, uncompiled."""
    for one in (inputs, *channels):
        if not isinstance(one, torch.Tensor) or one.dtype is not torch.float32:
            return False
        if one.device.type != _DEVICE:
            return False
    return (
        inputs.ndim > 1
        and inputs.numel() > 0
        and inputs.is_contiguous()
        and private.can_fuse_batch_norm()
        and not torch.compiler.is_compiling()  # the compiler fuses Keras's own operations
    )


class _Moments(torch.autograd.Function):
    """Computes the mean and the variance of each column."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean, variance = moments_of(rows)
        ctx.save_for_backward(rows, mean)
        return mean, variance

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        rows, mean = ctx.saved_tensors
        of_mean, of_variance = gradients
        count = len(rows)
        return gradient_of_rows(rows, mean, of_variance * (2 / count), of_mean / count)


class _Normalized(torch.autograd.Function):
    """Normalizes rows by a given mean and a given variance of each column."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, epsilon: float, *columns: torch.Tensor
    ) -> torch.Tensor:
        mean, variance, scale, offset = columns
        inverse = (variance + epsilon).rsqrt()
        ctx.save_for_backward(rows, mean, variance, scale)
        ctx.epsilon = epsilon
        return torch.batch_norm_elemt(rows, scale, offset, mean, inverse, epsilon)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        [gradient] = gradients
        rows, mean, variance, scale = ctx.saved_tensors
        inverse = (variance + ctx.epsilon).rsqrt()
        # with create_graph=True torch also differentiates this backward pass
        if torch.is_grad_enabled():
            of_rows = gradient * (scale * inverse)
            of_offset = gradient.sum(0)
            of_scale = (gradient * (rows - mean)).sum(0) * inverse
        else:
            gradient, zeros = gradient.contiguous(), torch.zeros_like(mean)
            _, _, of_scale, of_offset = torch.batch_norm_backward_reduce(
                gradient, rows, mean, inverse, scale, True, True, True
            )
            of_rows = torch.batch_norm_elemt(gradient, scale, zeros, zeros, inverse, ctx.epsilon)
        of_mean = -scale * inverse * of_offset
        of_variance = -0.5 * scale * inverse * inverse * of_scale
        return of_rows, None, of_mean, of_variance, of_scale, of_offset
