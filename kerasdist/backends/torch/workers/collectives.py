"""What a worker's replica can ask of the others, by torch's collectives."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, final

import keras
import torch

from kerasdist import context, keras_seam
from kerasdist.backends.collectives import DEFAULT_COMMUNICATION, Apply, Collectives
from kerasdist.backends.torch import batch_norm
from kerasdist.backends.torch.differentiable import (
    as_tensor,
    check_summable,
    gathered,
    gradient_of_global,
    summed,
    weighed_before,
)
from kerasdist.backends.torch.workers.gradients import GradientSum
from kerasdist.backends.torch.workers.group import Group
from kerasdist.backends.torch.workers.loop_state import LoopState
from kerasdist.backends.torch.workers.state import StepState
from kerasdist.collectives import CommunicationOptions
from kerasdist.training import numerics
from kerasdist.values import component, per_replica

if TYPE_CHECKING:
    from kerasdist.backends.torch.draws import StepDraws
    from kerasdist.backends.torch.workers.overlap import Overlap
    from kerasdist.strategy import Strategy


@final
class WorkerCollectives(Collectives):
    """The collectives of a worker's replica; one object for all of its steps."""

    def __init__(
        self, group: Group, draws: StepDraws, loops: LoopState, gradient_sum: GradientSum
    ) -> None:
        """Makes the collectives.

        Args:
            group: The workers.
            draws: The replicas' own generators.
            loops: The variables in custom loops.
            gradient_sum: Sums gradients.
        """
        self.rank = group.rank
        self.draws = draws
        self.group = group
        self.weight = self.gradient_weight = 1.0
        self.loss: torch.Tensor | None = None  # of this step, for `LossWatch`
        self.state: StepState = loops
        self.loops = loops
        self._gradient_sum = gradient_sum
        self._overlap: Overlap | None = None

    def begin(self, weight: float, state: StepState, overlap: Overlap | None = None) -> None:
        """Starts a step.

        Args:
            weight: This replica's weight in a mean over the examples.
            state: What its reads and writes of variables mean.
            overlap: Sums gradients while the backward pass runs.
        """
        self.weight = self.gradient_weight = weight
        self.loss = None
        self.state = state
        self._overlap = overlap
        self.draws.begin()
        if overlap is not None:
            overlap.begin()

    def weighs_loss_of(self, optimizer: Any, *, is_scaled: bool) -> bool:
        """Returns whether a loss gets this replica's weight before it is differentiated.

        Args:
            optimizer: The optimizer for which it is.
            is_scaled: Whether that scales losses.
        """
        return is_scaled or (self._overlap is not None and self._overlap.serves(optimizer))

    def differentiated_loss(
        self, optimizer: Any, loss: torch.Tensor, *, is_weighed: bool
    ) -> torch.Tensor:
        """Returns a loss as the backward pass is to begin with it.

        Args:
            optimizer: The optimizer for which it is.
            loss: The loss, scaled.
            is_weighed: Whether it has got this replica's weight.
        """
        if self._overlap is not None and self._overlap.serves(optimizer):
            loss = self._overlap.marked(loss)
        return weighed_before(self, loss) if is_weighed else loss

    def merge_call(
        self,
        strategy: Strategy,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Calls the function on every worker, with the values of its own replica.

        Args:
            strategy: The strategy.
            function: What to call.
            args: This replica's arguments.
            kwargs: Keyword arguments.
        """
        own_args, own_kwargs = per_replica([(list(args), dict(kwargs))])
        with self.no_replica(), self.state.paused():
            result = function(strategy, *own_args, **own_kwargs)
        return component(result, 0)

    def assign(self, variable: Any, value: Any, write: Callable[[Any, Any], Any]) -> Any:
        """Assigns in replica code, as the step's kind wants it.

        Args:
            variable: A Keras variable.
            value: A tensor of its type.
            write: Keras's own assignment.
        """
        return self.state.assign(variable, as_tensor(value), write)

    def equal_writes(self) -> AbstractContextManager[None]:
        """Returns a context in which what is assigned is equal on all replicas by itself."""
        return self.state.equal_writes()

    def mean_of_sum(self, total: torch.Tensor, replicas: int) -> torch.Tensor:
        """Returns a sum divided by the number of replicas, in its type.

        Args:
            total: What `all_sum` returned.
            replicas: How many replicas there are.
        """
        return (total / replicas).to(total.dtype)

    def all_sum(
        self,
        tensors: Sequence[torch.Tensor],
        options: CommunicationOptions = DEFAULT_COMMUNICATION,
    ) -> list[torch.Tensor]:
        """Returns each tensor summed over the replicas, with its gradient (see `summed`).

        Args:
            tensors: Tensors of this replica.
            options: Not needed: they travel together.
        """
        del options
        tensors = [as_tensor(tensor) for tensor in tensors]
        if not tensors:
            return []
        check_summable(tensors)
        return summed(self, "all_sum", tensors)

    def all_gather(self, tensor: torch.Tensor, axis: int = 0) -> torch.Tensor:
        """Returns the replicas' tensors one after another along an axis, with their gradient.

        Args:
            tensor: A tensor of this replica, of at least one dimension.
            axis: The axis, from 0.
        """
        return gathered(self, "all_gather", as_tensor(tensor), axis)

    def all_stack(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the replicas' tensors stacked along a new first axis, with their gradient.

        Args:
            tensor: A tensor of this replica, of the same shape on all of them.
        """
        return _Stack.apply(self, as_tensor(tensor))

    def own_moments(
        self, inputs: torch.Tensor, axes: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Returns mean and variance of the replica's own rows, by torch's kernel where it serves.

        Args:
            inputs: Tensor with at least one row.
            axes: The axes to average over.
        """
        return batch_norm.moments(inputs, axes)

    def apply_gradients(
        self, apply: Apply, optimizer: Any, gradients: list[Any], variables: list[Any] | None
    ) -> None:
        """Lets the optimizer update the variables, with the weighted sum of the gradients.

        Every worker does it, with equal gradients, on its own copy of the variables.

        Args:
            apply: Keras's own function for this.
            optimizer: A Keras optimizer.
            gradients: This replica's gradients; None where there is none.
            variables: The variables they belong to, or None for all that the optimizer knows.
        """
        del apply
        known = variables or keras_seam.optimized_variables(optimizer)
        weight = numerics.weight_of_gradients(optimizer, self.weight)
        if self._overlap is None:
            reduced = self._gradient_sum(gradients, known, weight)
        else:
            reduced = self._overlap.sum_up(optimizer, gradients, known, weight)
        with self.no_replica():
            if not optimizer.built and variables is not None:
                with keras.name_scope(optimizer.name):
                    optimizer.build(variables)
            keras_seam.apply_combined_gradients(optimizer, reduced, variables)

    def exchange(self, label: str, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns the sums of the replicas' tensors, of which this replica may do as it likes.

        Args:
            label: What it is for.
            tensors: Tensors of this replica.
        """
        del label
        return self.group.sums(tensors)

    def collect(self, label: str, tensor: torch.Tensor, axis: int) -> tuple[torch.Tensor, int]:
        """Returns the tensors of all replicas along an axis, and where this replica's begins.

        Args:
            label: What it is for.
            tensor: This replica's tensor.
            axis: The axis.
        """
        every = [parts[0] for parts in self.group.gather(label, [tensor], axis)]
        begin = sum(part.shape[axis] for part in every[: self.rank])
        return torch.cat(every, axis), begin

    @contextlib.contextmanager
    def no_replica(self) -> Iterator[None]:
        """Lets every worker run code alike, as code of no replica."""
        with keras_seam.outside_stateless_scopes(), context.replica_scope(None):
            yield


class _Stack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, replica: WorkerCollectives, tensor: torch.Tensor) -> torch.Tensor:
        ctx.replica = replica
        return replica.group.gather_alike(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        label = "gradient of all_stack"
        total = gradient_of_global(ctx.replica, label, gradient)
        return None, total[ctx.replica.rank]
