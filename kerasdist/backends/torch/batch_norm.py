"""Batch normalization on the CPU, in as few passes over the memory as torch's own makes.

Keras writes it as single operations, and torch differentiates each of them: in all some twenty
passes. torch's kernels make four. They take the statistics of the batch as part of the work; here
they may also be those of the global batch, so that the two halves are apart: the moments of some
rows, and what they do to the rows. Where the rows' own moments normalise them, as on one device,
the backward pass of both is torch's single one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from kerasdist import context, keras_seam

# The name under which moments know the tensor that they are of.
_OF = "_kerasdist_moments_of"


@cache
def install() -> None:
    """Puts the hooks into Keras, once in a process."""
    keras_seam.install_in_torch_nn("moments", _moments)
    keras_seam.install_in_torch_nn("batch_normalization", _normalized)


def moments(inputs: torch.Tensor, axes: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Returns mean and variance of a replica's rows, each of shape ``(channels,)``.

    Args:
        inputs: The rows, with the channels on the last axis.
        axes: The axes to average over.

    Returns:
        The two, or None if torch's kernel does not serve these inputs.
    """
    if not _serves(inputs) or sorted(axes) != list(range(inputs.ndim - 1)):
        return None
    mean, variance = _Moments.apply(inputs.reshape(-1, inputs.shape[-1]))
    return mean, variance


def _moments(
    original: Callable[..., Any],
    x: Any,
    axes: Sequence[int],
    keepdims: bool = False,
    synchronized: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    found = None if keepdims or synchronized else moments(x, axes)
    if found is None:
        return original(x, axes, keepdims, synchronized)
    for one in found:
        setattr(one, _OF, x)
    return found


def _normalized(  # noqa: PLR0917  Keras's parameters
    original: Callable[..., torch.Tensor],
    x: Any,
    mean: Any,
    variance: Any,
    axis: int,
    offset: Any = None,
    scale: Any = None,
    epsilon: float = 1e-3,
) -> torch.Tensor:
    channels = [mean, variance, *(one for one in (offset, scale) if one is not None)]
    if not _serves(x) or axis not in (-1, x.ndim - 1) or not all(map(_is_plain, channels)):
        return original(x, mean, variance, axis, offset, scale, epsilon)
    offset = torch.zeros_like(mean) if offset is None else offset
    scale = torch.ones_like(mean) if scale is None else scale
    rows = x.reshape(-1, x.shape[-1])
    if all(getattr(one, _OF, None) is x for one in (mean, variance)):
        mean, variance = mean.detach(), variance.detach()
        result = _NormalizedByOwn.apply(rows, epsilon, mean, variance, scale, offset)
    else:
        result = _Normalized.apply(rows, epsilon, mean, variance, scale, offset)
    return result.view_as(x)


def _serves(inputs: Any) -> bool:
    """Whether torch's kernels do: on the CPU, for rows that lie one after another."""
    return (
        context.replica() is not None
        and _is_plain(inputs)
        and inputs.ndim > 1
        and inputs.numel() > 0
        and inputs.is_contiguous()
        and not torch._C._are_functorch_transforms_active()
    )


def _is_plain(tensor: Any) -> bool:
    return (
        isinstance(tensor, torch.Tensor)
        and tensor.dtype is torch.float32
        and tensor.device.type == "cpu"
    )


class _Moments(torch.autograd.Function):
    """Mean and variance of each column."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean, variance = torch.batch_norm_update_stats(rows, None, None, 0.0)
        ctx.save_for_backward(rows, mean)
        return mean, variance

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        rows, mean = ctx.saved_tensors
        of_mean, of_variance = gradients
        slope = of_variance * (2 / len(rows))
        if torch.is_grad_enabled():  # to be differentiated once more
            return slope * (rows - rows.mean(0)) + of_mean / len(rows)
        offset = of_mean / len(rows) - slope * mean
        # One pass for ``slope * rows + offset``.
        identity = torch.zeros_like(mean), torch.ones_like(mean)
        return _normal(rows, slope, offset, identity, 0.0)


class _Normalized(torch.autograd.Function):
    """Rows by any mean and variance of their columns."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, epsilon: float, *columns: torch.Tensor
    ) -> torch.Tensor:
        return _forward(ctx, rows, epsilon, columns)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        [gradient] = gradients
        rows, mean, variance, scale = ctx.saved_tensors
        inverse = (variance + ctx.epsilon).rsqrt()
        if torch.is_grad_enabled():  # to be differentiated once more
            of_rows = gradient * (scale * inverse)
            of_offset = gradient.sum(0)
            of_scale = (gradient * (rows - mean)).sum(0) * inverse
        else:
            statistics = mean, variance, None, None, False
            of_rows, of_scale, of_offset = _backward(gradient, rows, scale, statistics, ctx.epsilon)
        of_mean = -scale * inverse * of_offset
        of_variance = -0.5 * scale * inverse * inverse * of_scale
        return of_rows, None, of_mean, of_variance, of_scale, of_offset


class _NormalizedByOwn(torch.autograd.Function):
    """Rows by the mean and variance of their own columns, through which it differentiates, too."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, epsilon: float, *columns: torch.Tensor
    ) -> torch.Tensor:
        return _forward(ctx, rows, epsilon, columns)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        [gradient] = gradients
        rows, mean, variance, scale = ctx.saved_tensors
        if torch.is_grad_enabled():  # to be differentiated once more
            deviation = rows - rows.mean(0)
            inverse = (deviation.square().mean(0) + ctx.epsilon).rsqrt()
            normal = deviation * inverse
            of_offset = gradient.sum(0)
            of_scale = (gradient * normal).sum(0)
            of_rows = scale * inverse * (gradient - (of_offset + normal * of_scale) / len(rows))
        else:
            inverse = (variance + ctx.epsilon).rsqrt()
            statistics = None, None, mean, inverse, True
            of_rows, of_scale, of_offset = _backward(gradient, rows, scale, statistics, ctx.epsilon)
        return of_rows, None, None, None, of_scale, of_offset


def _forward(
    ctx: Any, rows: torch.Tensor, epsilon: float, columns: Sequence[torch.Tensor]
) -> torch.Tensor:
    mean, variance, scale, offset = columns
    ctx.save_for_backward(rows, mean, variance, scale)
    ctx.epsilon = epsilon
    return _normal(rows, scale, offset, (mean, variance), epsilon)


def _normal(
    rows: torch.Tensor,
    scale: torch.Tensor,
    offset: torch.Tensor,
    statistics: tuple[torch.Tensor, torch.Tensor],
    epsilon: float,
) -> torch.Tensor:
    """Returns the rows by given statistics, in one pass.

    Args:
        rows: The rows.
        scale: What the normal columns are multiplied by.
        offset: What is added to them then.
        statistics: Mean and variance of each column.
        epsilon: What is added to the variance.
    """
    return torch.native_batch_norm(rows, scale, offset, *statistics, False, 0.0, epsilon)[0]


def _backward(
    gradient: torch.Tensor,
    rows: torch.Tensor,
    scale: torch.Tensor,
    statistics: tuple[Any, ...],
    epsilon: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the gradients by rows, scale and offset, in two passes.

    Args:
        gradient: The gradient by the result.
        rows: The rows.
        scale: The scale.
        statistics: Mean and variance that were given; mean and inverse deviation of the rows; and
            which of the two count: whether those of the rows do.
        epsilon: What was added to the variance.
    """
    kernel = torch.ops.aten.native_batch_norm_backward
    wanted = [True, True, True]
    return kernel(gradient.contiguous(), rows, scale, *statistics, epsilon, wanted)
