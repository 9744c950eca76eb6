"""What a replica's thread can ask of the others: sums, gathers, and the update of the variables."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

import keras
import torch

from kerasdist import context, keras_seam
from kerasdist.backends.collectives import DEFAULT_COMMUNICATION, Apply, Collectives
from kerasdist.backends.torch import batch_norm
from kerasdist.backends.torch.components import aggregated
from kerasdist.backends.torch.differentiable import (
    as_tensor,
    check_summable,
    gathered,
    summed,
    weighed_before,
)
from kerasdist.backends.torch.gradients import Gradients, check_same, weighted_sum
from kerasdist.backends.torch.rendezvous import Rendezvous
from kerasdist.backends.torch.variables import FIT, ReplicaScope
from kerasdist.collectives import CommunicationOptions
from kerasdist.errors import ReplicaError
from kerasdist.structures import map_leaves
from kerasdist.training import numerics
from kerasdist.values import component, per_replica

if TYPE_CHECKING:
    from kerasdist.backends.torch.draws import StepDraws
    from kerasdist.strategy import Strategy


@final
class TorchCollectives(Collectives):
    """The collectives of one replica; one object a replica, for all of its steps."""

    weighs_scaled_losses = True

    def __init__(
        self,
        rank: int,
        *,
        rendezvous: Rendezvous,
        scopes: Sequence[ReplicaScope],
        device: str,
        draws: StepDraws,
        build_lock: threading.RLock,
    ) -> None:
        """Makes the collectives of one replica.

        Args:
            rank: The replica's number.
            rendezvous: Where the replicas meet.
            scopes: All replicas' scopes.
            device: Keras's name of the device that holds the variables.
            draws: The replicas' own generators.
            build_lock: Held by the replica that builds a layer.
        """
        self._build_lock = build_lock
        self.rank = rank
        self.draws = draws
        self._rendezvous = rendezvous
        self._scopes = scopes
        self.scope = scopes[rank]
        self._device = device
        self._number = 0
        self.count = 0
        self.weight = self.gradient_weight = 1.0
        self.loss: torch.Tensor | None = None  # of this step, for `LossWatch`

    def begin(self, count: int, weight: float) -> None:
        """Starts a step.

        Args:
            count: How many replicas take part.
            weight: This replica's weight in a mean over the examples.
        """
        self.count = count
        self.weight = self.gradient_weight = weight
        self.loss = None
        self._number = 0

    def differentiated_loss(
        self, optimizer: Any, loss: torch.Tensor, *, is_weighed: bool
    ) -> torch.Tensor:
        """Returns a loss as the backward pass is to begin with it.

        Args:
            optimizer: The optimizer for which it is.
            loss: The loss, scaled.
            is_weighed: Whether it has got this replica's weight.
        """
        del optimizer
        return weighed_before(self, loss) if is_weighed else loss

    def merge_call(
        self,
        strategy: Strategy,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Calls the function once, in the thread of the last replica to arrive.

        Args:
            strategy: The strategy.
            function: What to call.
            args: This replica's arguments.
            kwargs: Keyword arguments.
        """

        def merged(brought: Sequence[tuple[list[Any], dict[str, Any]]]) -> tuple[Any, list[int]]:
            with self.no_replica():
                committed = self._commit(sums=self.scope.rules is not FIT)
                all_args, all_kwargs = per_replica(brought)
                return function(strategy, *all_args, **all_kwargs), committed

        label = self._label(f"merge_call of {getattr(function, '__qualname__', function)}")
        brought = (list(args), dict(kwargs))
        result, committed = self._rendezvous.meet(self.rank, label, brought, merged)
        self.scope.settle(committed)
        return map_leaves(self._own, component(result, self.rank))

    def assign_together(self, variable: Any, value: torch.Tensor) -> None:
        """Assigns the replicas' values to a variable, combined by its aggregation.

        Args:
            variable: A Keras variable.
            value: This replica's value.
        """

        def assign(brought: Sequence[torch.Tensor]) -> None:
            with torch.no_grad():
                keras_seam.stored_value(variable).copy_(aggregated(variable, brought))

        label = self._label(f"assignment to {variable.path}")
        self._rendezvous.meet(self.rank, label, value.detach(), assign)

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
            options: Not needed: the tensors are summed where they are.
        """
        del options
        tensors = [as_tensor(tensor) for tensor in tensors]
        if not tensors:
            return []
        check_summable(tensors)
        return summed(self, self._label("all_sum"), tensors)

    def all_gather(self, tensor: torch.Tensor, axis: int = 0) -> torch.Tensor:
        """Returns the replicas' tensors one after another along an axis, with their gradient.

        Args:
            tensor: A tensor of this replica, of at least one dimension.
            axis: The axis, from 0.
        """
        return gathered(self, self._label("all_gather"), as_tensor(tensor), axis)

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
        """Lets the optimizer update the variables once, with the weighted sum of the gradients.

        The last replica to arrive does it, as code of no replica.

        Args:
            apply: Keras's own function for this.
            optimizer: A Keras optimizer.
            gradients: This replica's gradients; None where there is none.
            variables: The variables they belong to, or None for all that the optimizer knows.
        """

        def update(brought: Sequence[tuple[float, Gradients, list[Any] | None]]) -> list[int]:
            all_weights, all_gradients, all_variables = zip(*brought, strict=True)
            weights = [numerics.weight_of_gradients(optimizer, weight) for weight in all_weights]
            check_same(all_gradients, all_variables)
            known = variables or keras_seam.optimized_variables(optimizer)
            reduced = weighted_sum(all_gradients, weights, known)
            with self.no_replica():
                committed = self._commit(sums=False)
                if not optimizer.built and variables is not None:
                    with keras.name_scope(optimizer.name):
                        optimizer.build(variables)
                keras_seam.apply_combined_gradients(optimizer, reduced, variables)
            return committed

        label = f"{optimizer.name}.apply"
        brought = (self.weight, gradients, variables)
        committed = self._rendezvous.meet(self.rank, label, brought, update)
        self.scope.settle(committed)

    def exchange(self, label: str, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns the sums of the replicas' tensors, of which this replica may do as it likes.

        Args:
            label: What the meeting is for.
            tensors: Tensors of this replica.
        """
        shapes = [tuple(tensor.shape) for tensor in tensors]
        sums = self._rendezvous.meet(self.rank, f"{label} of shapes {shapes}", tensors, _sums)
        return sums[self.rank]

    def collect(self, label: str, tensor: torch.Tensor, axis: int) -> tuple[torch.Tensor, int]:
        """Returns the tensors of all replicas along an axis, and where this replica's begins.

        Args:
            label: What the meeting is for.
            tensor: This replica's tensor.
            axis: The axis.
        """
        shape = tuple("any" if i == axis else size for i, size in enumerate(tensor.shape))
        label = f"{label} of shape {shape}"
        gathered, begins = self._rendezvous.meet(
            self.rank, label, tensor, lambda brought: _concatenated(brought, axis)
        )
        return gathered[self.rank], begins[self.rank]

    @contextlib.contextmanager
    def no_replica(self) -> Iterator[None]:
        """Lets code run once for all replicas, in the thread of one."""
        with (
            keras_seam.outside_stateless_scopes(),
            context.replica_scope(None),
            keras.device(self._device),
        ):
            yield

    @contextlib.contextmanager
    def building(self) -> Iterator[None]:
        """Lets one replica at a time build a layer, which all of them share.

        Raises:
            ReplicaError: If another replica does not come to an end with it.
        """
        if self._rendezvous.turns:
            yield
            return
        if not self._build_lock.acquire(timeout=self._rendezvous.timeout):
            raise ReplicaError(
                "Expected one replica after the other to build a layer. Received: a replica that "
                f"builds for more than {self._rendezvous.timeout} seconds. Call no collective in "
                "`build`, or build the model before the replicas run."
            )
        try:
            yield
        finally:
            self._build_lock.release()

    def _own(self, leaf: Any) -> Any:
        """A tensor of this replica's own, of one that all replicas got."""
        return leaf.to(self.scope.device, copy=True) if isinstance(leaf, torch.Tensor) else leaf

    def _commit(self, *, sums: bool) -> list[int]:
        return self.scope.rules.commit(self._scopes[: self.count], sums=sums)

    def _label(self, name: str) -> str:
        self._number += 1
        return f"{name} number {self._number}"


def _sums(brought: Sequence[Sequence[torch.Tensor]]) -> list[list[torch.Tensor]]:
    """Each replica's own sums, on the device of what it brought."""
    return [
        [_sum_on(mine[i].device, [tensors[i] for tensors in brought]) for i in range(len(mine))]
        for mine in brought
    ]


def _sum_on(device: torch.device, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    total = parts[0].to(device, copy=True)
    for part in parts[1:]:
        total += part.to(device)
    return total


def _concatenated(
    brought: Sequence[torch.Tensor], axis: int
) -> tuple[list[torch.Tensor], list[int]]:
    """Each replica's own copy of all tensors along an axis, and where each one's part begins."""
    begins = [0]
    for tensor in brought:
        begins.append(begins[-1] + tensor.shape[axis])
    return [torch.cat([part.to(mine.device) for part in brought], axis) for mine in brought], begins
