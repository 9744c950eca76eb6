"""Sums and gathers over the replicas, and their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from kerasdist import keras_seam
from kerasdist.backends import checks


class Replica(Protocol):
    """What is needed of a replica's collectives.

    Attributes:
        gradient_weight: The weight that the gradients of the replica's loss will get: its share of
            the examples; 1 in the backward pass of a loss that has that already.
    """

    gradient_weight: float

    def exchange(self, label: str, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns the sums of the replicas' tensors.

        Args:
            label: What it is for.
            tensors: Tensors of this replica.
        """
        ...

    def collect(self, label: str, tensor: torch.Tensor, axis: int) -> tuple[torch.Tensor, int]:
        """Returns the tensors of all replicas along an axis, and where this replica's begins.

        Args:
            label: What it is for.
            tensor: This replica's tensor.
            axis: The axis.
        """
        ...


def summed(replica: Replica, label: str, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns each tensor summed over the replicas, with its gradient (see `_Sum`).

    Args:
        replica: The collectives of the replica that calls.
        label: What it is for.
        tensors: Its tensors.
    """
    return list(_Sum.apply(replica, label, 1.0, 1.0, *tensors))


def gathered(replica: Replica, label: str, tensor: torch.Tensor, axis: int) -> torch.Tensor:
    """Returns the replicas' tensors one after another along an axis, with their gradient.

    Args:
        replica: The collectives of the replica that calls.
        label: What it is for.
        tensor: Its tensor.
        axis: The axis.
    """
    return _Gather.apply(replica, label, tensor, axis)


def weighed_before(replica: Replica, loss: torch.Tensor) -> torch.Tensor:
    """Returns a loss that has the replica's weight, so that its backward pass knows.

    Args:
        replica: The collectives of the replica that calls.
        loss: The loss.
    """
    return _Weighed.apply(replica, loss)


def gradient_of_global(replica: Replica, label: str, gradient: torch.Tensor) -> torch.Tensor:
    """Returns the gradient of the global loss by a value that all replicas hold alike.

    Args:
        replica: The collectives of the replica that calls.
        label: What it is for.
        gradient: That of its own loss.
    """
    weight = replica.gradient_weight
    [total] = _Sum.apply(replica, label, 1.0 / weight, weight, gradient)
    return total


class _Weighed(torch.autograd.Function):
    """A loss that has its replica's weight. Other losses of the same step may be without."""

    @staticmethod
    def forward(ctx: Any, replica: Replica, loss: torch.Tensor) -> torch.Tensor:
        ctx.replica = replica
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        replica, weight = ctx.replica, ctx.replica.gradient_weight
        replica.gradient_weight = 1.0
        # At the end of this pass.
        torch.autograd.Variable._execution_engine.queue_callback(
            lambda: setattr(replica, "gradient_weight", weight)
        )
        return None, *gradients


class _Sum(torch.autograd.Function):
    """Replica r's ``outer * (sum over s of inner_s * x_s)``.

    The gradients that reach the optimizer are weighted by each replica's share w of the batch
    (contract C1), so the gradient that replica s sends to replica r counts with ``w_s / w_r`` here.
    With equal shares that is an all-sum again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        replica: Replica,
        label: str,
        outer: float,
        inner: float,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        # Kept in ctx: on a GPU the backward pass runs in a thread of torch's.
        ctx.replica, ctx.label, ctx.outer, ctx.inner = replica, label, outer, inner
        scaled = tensors if inner == 1.0 else [tensor * inner for tensor in tensors]
        sums = replica.exchange(label, scaled)
        return tuple(sums if outer == 1.0 else [tensor * outer for tensor in sums])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        label = f"gradient of {ctx.label}"
        weight = ctx.replica.gradient_weight
        outer, inner = ctx.inner / weight, ctx.outer * weight
        return (None, None, None, None, *_Sum.apply(ctx.replica, label, outer, inner, *gradients))


class _Gather(torch.autograd.Function):
    """The replicas' tensors, one after another along an axis."""

    @staticmethod
    def forward(
        ctx: Any, replica: Replica, label: str, tensor: torch.Tensor, axis: int
    ) -> torch.Tensor:
        gathered, begin = replica.collect(label, tensor, axis)
        ctx.replica, ctx.label = replica, label
        ctx.part = axis, begin, tensor.shape[axis]
        return gathered

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        label = f"gradient of {ctx.label}"
        total = gradient_of_global(ctx.replica, label, gradient)
        return None, None, total.narrow(*ctx.part), None


def check_summable(tensors: Sequence[torch.Tensor]) -> None:
    """Refuses booleans, of which torch makes something else than their number.

    Args:
        tensors: What is to be added.

    Raises:
        TypeError: If one of them is boolean.
    """
    for tensor in tensors:
        checks.check_summable(str(tensor.dtype).removeprefix("torch."))


def as_tensor(value: Any) -> torch.Tensor:
    """Returns a tensor of a value that may be a number or an array.

    Args:
        value: The value.
    """
    return value if isinstance(value, torch.Tensor) else keras_seam.ops.convert_to_tensor(value)
