"""What a replica's thread can ask of the others: sums, gathers, and the update of the variables."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

import keras
import torch

from kerasdist import context, keras_seam
from kerasdist.backends.base import DEFAULT_COMMUNICATION, Apply, Collectives
from kerasdist.backends.torch.rendezvous import Rendezvous
from kerasdist.backends.torch.variables import ReplicaScope, commit
from kerasdist.collectives import CommunicationOptions
from kerasdist.errors import ReplicaError
from kerasdist.training import numerics
from kerasdist.values import component, per_replica

if TYPE_CHECKING:
    from kerasdist.backends.torch.draws import StepDraws
    from kerasdist.strategy import Strategy

Gradients = Sequence[torch.Tensor | None]


@final
class TorchCollectives(Collectives):
    """The collectives of one replica; one object a replica, for all of its steps."""

    weighs_scaled_losses = True

    def __init__(
        self,
        rank: int,
        rendezvous: Rendezvous,
        scopes: Sequence[ReplicaScope],
        device: str,
        draws: StepDraws,
    ) -> None:
        """Makes the collectives of one replica.

        Args:
            rank: The replica's number.
            rendezvous: Where the replicas meet.
            scopes: All replicas' scopes.
            device: Keras's name of the device that holds the variables.
            draws: The replicas' own generators.
        """
        self.rank = rank
        self.draws = draws
        self._rendezvous = rendezvous
        self._scopes = scopes
        self.scope = scopes[rank]
        self._device = device
        self._number = 0
        self.count = 0
        self.weight = 1.0
        self.loss: torch.Tensor | None = None  # of this step, for `LossWatch`

    def begin(self, count: int, weight: float) -> None:
        """Starts a step.

        Args:
            count: How many replicas take part.
            weight: This replica's weight in a mean over the examples.
        """
        self.count = count
        self.weight = weight
        self.loss = None
        self._number = 0

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
            with (
                keras_seam.outside_stateless_scopes(),
                context.replica_scope(None),
                keras.device(self._device),
            ):
                committed = commit(self._scopes[: self.count], sums=False)
                all_args, all_kwargs = per_replica(brought)
                return function(strategy, *all_args, **all_kwargs), committed

        label = self._label(f"merge_call of {getattr(function, '__qualname__', function)}")
        brought = (list(args), dict(kwargs))
        result, committed = self._rendezvous.meet(self.rank, label, brought, merged)
        self.scope.settle(committed)
        return component(result, self.rank)

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
        """Returns each tensor summed over the replicas, with its gradient (see `_Sum`).

        Args:
            tensors: Tensors of this replica.
            options: Not needed: the tensors are summed where they are.
        """
        del options
        return list(_Sum.apply(self, self._label("all_sum"), 1.0, 1.0, *tensors))

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the replicas' tensors one after another along axis 0, with their gradient.

        Args:
            tensor: A tensor of this replica, of at least one dimension.
        """
        return _Gather.apply(self, self._label("all_gather"), tensor)

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
            _check_same(all_gradients, all_variables)
            known = variables or keras_seam.optimized_variables(optimizer)
            reduced = weighted_sum(all_gradients, weights, known)
            with (
                keras_seam.outside_stateless_scopes(),
                context.replica_scope(None),
                keras.device(self._device),
            ):
                committed = commit(self._scopes[: self.count], sums=False)
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

    def collect(self, label: str, tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Returns the rows of all replicas, and at which of them this replica's begin.

        Args:
            label: What the meeting is for.
            tensor: This replica's rows.
        """
        label = f"{label} of rows of shape {tuple(tensor.shape[1:])}"
        gathered, begins = self._rendezvous.meet(self.rank, label, tensor, _concatenated)
        return gathered[self.rank], begins[self.rank]

    def _label(self, name: str) -> str:
        self._number += 1
        return f"{name} number {self._number}"


class _Sum(torch.autograd.Function):
    """Replica r's ``outer * (sum over s of inner_s * x_s)``.

    The gradients that reach the optimizer are weighted by each replica's share w of the batch
    (contract C1), so the gradient that replica s sends to replica r counts with ``w_s / w_r`` here.
    With equal shares that is an all-sum again.
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
        # Kept in ctx: on a GPU the backward pass runs in a thread of torch's.
        ctx.replica, ctx.label, ctx.outer, ctx.inner = replica, label, outer, inner
        ctx.weight = replica.weight
        scaled = tensors if inner == 1.0 else [tensor * inner for tensor in tensors]
        sums = replica.exchange(label, scaled)
        return tuple(sums if outer == 1.0 else [tensor * outer for tensor in sums])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        label = f"gradient of {ctx.label}"
        outer, inner = ctx.inner / ctx.weight, ctx.outer * ctx.weight
        return (None, None, None, None, *_Sum.apply(ctx.replica, label, outer, inner, *gradients))


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, replica: TorchCollectives, label: str, tensor: torch.Tensor
    ) -> torch.Tensor:
        gathered, begin = replica.collect(label, tensor)
        ctx.replica, ctx.label, ctx.weight = replica, label, replica.weight
        ctx.rows = slice(begin, begin + tensor.shape[0])
        return gathered

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        label = f"gradient of {ctx.label}"
        [total] = _Sum.apply(ctx.replica, label, 1.0 / ctx.weight, ctx.weight, gradient)
        return None, None, total[ctx.rows]


def weighted_sum(
    all_gradients: Sequence[Gradients], weights: Sequence[float], variables: Sequence[Any]
) -> list[torch.Tensor | None]:
    """Returns the weighted sum of the replicas' gradients, in the order of ranks.

    Args:
        all_gradients: Each replica's gradients; None where there is none.
        weights: Each replica's weight.
        variables: The variables they belong to.
    """
    with torch.no_grad():
        tensors = [[g for g in gradients if g is not None] for gradients in all_gradients]
        if any(len(some) < len(variables) for some in tensors) or any(
            variable.overwrite_with_gradient for variable in variables
        ):
            columns = zip(variables, zip(*all_gradients, strict=True), strict=False)
            return [_sum_of_one(variable, column, weights) for variable, column in columns]
        return [*_weighted_sum_of_tensors(tensors, weights)]


def _weighted_sum_of_tensors(
    all_tensors: Sequence[list[torch.Tensor]], weights: Sequence[float]
) -> Sequence[torch.Tensor]:
    # A running mean, in one pass a replica; it is the weighted sum, as weights sum to 1.
    mean: Sequence[torch.Tensor] = all_tensors[0]
    weight = weights[0]
    for index in range(1, len(weights)):
        here = [g.to(m.device) for g, m in zip(all_tensors[index], mean, strict=True)]
        weight += weights[index]
        part = weights[index] / weight
        if index == 1:
            mean = torch._foreach_lerp([*mean], here, part)
        else:
            torch._foreach_lerp_([*mean], here, part)
    # They do not where losses were weighted before: see `weighs_scaled_losses`.
    return mean if math.isclose(weight, 1.0) else torch._foreach_mul([*mean], weight)


def _sum_of_one(
    variable: Any, column: Sequence[torch.Tensor | None], weights: Sequence[float]
) -> torch.Tensor | None:
    pairs = [(g, weight) for g, weight in zip(column, weights, strict=True) if g is not None]
    if not pairs:
        return None
    device = pairs[0][0].device
    if variable.overwrite_with_gradient:
        # Not a gradient but a new value (float8: scales and histories of maxima), as Keras combines
        # it.
        parts = [gradient.to(device) for gradient, _ in pairs]
        return torch.stack(parts).amax(0)
    total = pairs[0][0] * pairs[0][1]
    for gradient, weight in pairs[1:]:
        total = total + gradient.to(device) * weight
    return total


def _check_same(
    all_gradients: Sequence[Gradients], all_variables: Sequence[list[Any] | None]
) -> None:
    keys = [None if variables is None else [*map(id, variables)] for variables in all_variables]
    sizes = [len(gradients) for gradients in all_gradients]
    if any(key != keys[0] for key in keys) or any(size != sizes[0] for size in sizes):
        raise ReplicaError(
            "Expected every replica to apply gradients of the same variables in the same order. "
            f"Received: {sizes} gradients a replica, of variables that differ. Replicas differ in "
            "their batch only: choose the variables to update without looking at the data."
        )


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


def _concatenated(brought: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[int]]:
    """Each replica's own copy of all rows, and where each one's rows begin."""
    begins = [0]
    for tensor in brought:
        begins.append(begins[-1] + tensor.shape[0])
    return [torch.cat([part.to(mine.device) for part in brought]) for mine in brought], begins
