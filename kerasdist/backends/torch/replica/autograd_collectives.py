"""All-sum and all-gather over the replicas, differentiable."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from kerasdist import keras_compat
from kerasdist.backends.base import checks

if TYPE_CHECKING:
    from kerasdist.backends.torch.replica.collectives import TorchCollectives


def gradient_of_global(
    replica: TorchCollectives, label: str, gradient: torch.Tensor
) -> torch.Tensor:
    """Sums the replicas' gradients of a value that they share, weighted as in `GlobalSum`."""
    weight = replica.gradient_weight
    [total] = GlobalSum.apply(replica, label, 1.0 / weight, weight, gradient)
    return total


class WeightedLoss(torch.autograd.Function):
    """Returns a loss that is weighted by the replica's share of the batch, unchanged.

    While its backward pass runs, gradients have that weight; `GlobalSum` must not apply it again.
    A step may have other losses that are not weighted.
    """

    @staticmethod
    def forward(ctx: Any, replica: TorchCollectives, loss: torch.Tensor) -> torch.Tensor:
        """Returns the loss unchanged."""
        ctx.replica = replica
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        """Sets the replica's gradient weight to 1 for the rest of this backward pass."""
        replica, weight = ctx.replica, ctx.replica.gradient_weight
        replica.gradient_weight = 1.0
        # Restores the weight at the end of this backward pass.
        torch.autograd.Variable._execution_engine.queue_callback(
            lambda: setattr(replica, "gradient_weight", weight)
        )
        return None, *gradients


class GlobalSum(torch.autograd.Function):
    """Computes ``outer * (sum over all replicas s of inner_s * x_s)`` on replica r.

    The optimizer weights the gradients of replica r by its share w_r of the batch (contract C1). So
    in the backward pass a gradient from replica s counts ``w_s / w_r`` on replica r. With equal
    shares the backward pass is a plain all-sum.
    """

    @staticmethod
    def forward(
        ctx: Any,
        replica: TorchCollectives,
        label: str,
        outer: float,
        inner: float,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """Returns the scaled sums."""
        # Kept in ctx, since on a GPU torch runs the backward pass in a thread of its own.
        ctx.replica, ctx.label, ctx.outer, ctx.inner = replica, label, outer, inner
        replica.scope.sums_in_backward |= any(ctx.needs_input_grad)
        scaled = tensors if inner == 1.0 else [tensor * inner for tensor in tensors]
        sums = replica.exchange(label, scaled)
        return tuple(sums if outer == 1.0 else [tensor * outer for tensor in sums])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        """Returns the scaled sums of the gradients."""
        label = f"gradient of {ctx.label}"
        weight = ctx.replica.gradient_weight
        outer, inner = ctx.inner / weight, ctx.outer * weight
        sums = GlobalSum.apply(ctx.replica, label, outer, inner, *gradients)
        return None, None, None, None, *sums


class GlobalGather(torch.autograd.Function):
    """Concatenates the replicas' tensors along an axis; `alike`: all have the same shape."""

    @staticmethod
    def forward(  # noqa: PLR0917  autograd's functions take no names
        ctx: Any,
        replica: TorchCollectives,
        label: str,
        tensor: torch.Tensor,
        axis: int,
        alike: bool,
    ) -> torch.Tensor:
        """Returns the tensors of all replicas."""
        replica.scope.sums_in_backward |= any(ctx.needs_input_grad)
        gathered, begin = replica.collect(label, tensor, axis, alike=alike)
        ctx.replica, ctx.label = replica, label
        ctx.part = axis, begin, tensor.shape[axis]
        return gathered

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        """Returns this replica's part of the summed gradients."""
        label = f"gradient of {ctx.label}"
        total = gradient_of_global(ctx.replica, label, gradient)
        return None, None, total.narrow(*ctx.part), None, None


def check_summable(tensors: Sequence[torch.Tensor]) -> None:
    """Refuses booleans, whose sum in torch is a logical or, and what torch does not add."""
    for tensor in tensors:
        name = str(tensor.dtype).removeprefix("torch.")
        checks.check_summable(name)
        if name.startswith("float8"):
            raise checks.not_summable(name, "float32")
        if name in ("uint16", "uint32", "uint64"):
            raise checks.not_summable(name, "int64")


def as_tensor(value: Any) -> torch.Tensor:
    """Converts a number or an array to a tensor; returns a tensor unchanged."""
    return value if isinstance(value, torch.Tensor) else keras_compat.ops.convert_to_tensor(value)
