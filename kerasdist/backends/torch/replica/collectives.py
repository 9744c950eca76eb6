"""Collectives between replicas: sums, gathers, and the update of the variables.

The replicas of a process are threads that wait for each other (`threads.py`). The last thread to
arrive combines the values of the threads, and then combines the result with the results of the
other processes (`process_group.py`). A replica that is alone in its process waits for no thread.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, final

import keras
import torch

from kerasdist import keras_compat
from kerasdist.api.options import CommunicationOptions
from kerasdist.api.replica_context import LocalBatch, ReplicaContext
from kerasdist.api.values import component, per_replica
from kerasdist.backends.base import checks
from kerasdist.backends.base.collectives import DEFAULT_COMMUNICATION, Apply, Collectives, Variables
from kerasdist.backends.torch import internals
from kerasdist.backends.torch.fit import batch_norm, graph_ops
from kerasdist.backends.torch.fit.fit_rules import FitRules
from kerasdist.backends.torch.fit.gradients import Gradients, check_same, weighted_sum
from kerasdist.backends.torch.replica.placing import add_up, computing_on, torch_device
from kerasdist.backends.torch.replica.threads import ReplicaThreads
from kerasdist.backends.torch.state import sharded_optimizers
from kerasdist.backends.torch.state.components import Components
from kerasdist.backends.torch.state.variables import ReplicaScope
from kerasdist.backends.torch.workers.buckets import GradientSum
from kerasdist.backends.torch.workers.process_group import Group
from kerasdist.core.context import current, replaced, replica_scope
from kerasdist.core.devices import Device
from kerasdist.core.structures import Arguments, map_leaves
from kerasdist.training import numerics

if TYPE_CHECKING:
    from kerasdist.api.strategy import Strategy


_Value = TypeVar("_Value")
_Result = TypeVar("_Result")


class Draws(Protocol):
    """The random generators of the replicas of a step."""

    def begin(self) -> None:
        """Starts a step of the replicas, before any of them draws."""

    def end(self) -> None:
        """Ends a step."""

    def generator(self, rank: int) -> torch.Generator:
        """Returns the generator of one replica."""
        ...


@final
@dataclass(frozen=True, eq=False)
class Shared:
    """What the replicas of a process share.

    Attributes:
        scopes: The scopes through which the replicas read and write variables.
        threads: The threads in which the replicas run; None for a single replica.
        group: The collectives between the processes.
        gradient_sum: Sums the workers' gradients; None if there is one worker.
        components: In custom loops, the values of variables whose value differs between replicas.
        device: The device that holds the variables.
        draws: The random generators of the replicas.
    """

    scopes: Sequence[ReplicaScope]
    threads: ReplicaThreads | None
    group: Group
    gradient_sum: GradientSum | None
    components: Components
    device: Device
    draws: Draws


@final
class TorchCollectives(Collectives):
    """The collectives of one replica. The same object serves all steps of the replica.

    Attributes:
        rank: The replica's number among the replicas of all workers.
        number: The number by which operations in compiled code find this object.
        scope: The scope through which the replica reads and writes variables.
        draws: The random generators of this process's replicas.
        weight: The replica's weight: its fraction of the rows of the global batch.
        calls: How many collectives the replica has called in the current step.
        context: The replica's context in the step that has begun most recently.
        gradient_weight: The factor by which the gradients of the replica's loss will be multiplied:
            `weight`, or 1 during the backward pass of a loss that was already multiplied by it.
    """

    own_moments = staticmethod(batch_norm.moments)

    def __init__(self, index: int, shared: Shared) -> None:
        """Makes the collectives of the replica that has this index in its process."""
        self.scope = shared.scopes[index]
        self.rank = self.scope.rank
        self.number = graph_ops.numbered(self)
        self.draws = shared.draws
        self.weight = self.gradient_weight = 1.0
        self.context: ReplicaContext
        threads = shared.threads
        self._index, self._shared = index, shared
        self._meet = _keep_own if threads is None else partial(threads.meet, index)
        self.calls = 0
        self._count = 0

    def begin(
        self, strategy: Strategy, replicas: int, count: int, local_batch: LocalBatch | None
    ) -> ReplicaContext:
        """Starts a step; returns the replica's context.

        Args:
            strategy: The strategy that runs the step.
            replicas: How many replicas take part in all processes.
            count: How many of these replicas are in this process.
            local_batch: This replica's local batch in `fit`, `evaluate` and `predict`; None in a
                custom loop.
        """
        self._count = count
        self.calls = 0
        self.weight = self.gradient_weight = self.scope.weight
        self.context = ReplicaContext(
            strategy=strategy,
            replica_id_in_sync_group=self.rank,
            num_replicas_in_sync=replicas,
            collectives=self,
            local_batch=local_batch,
        )
        return self.context

    @property
    def can_create_variables(self) -> bool:
        """Whether this replica's code may make variables at this point."""
        return not self.scope.rules.is_fit or self._count == 1

    def merge_call(self, strategy: Strategy, function: Callable[..., Any], given: Arguments) -> Any:
        """Calls the function once in each process, in the thread of the last replica to arrive."""

        def merged(brought: Sequence[Arguments]) -> tuple[Any, list[int]]:
            with self.no_replica():
                committed = self.scope.rules.pause(self._shared.scopes[: self._count])
                return per_replica(brought).call(function, strategy), committed

        label = self.label(f"merge_call of {getattr(function, '__qualname__', function)}")
        result, committed = self._meet(label, given, merged)
        self.scope.refresh(committed)
        return map_leaves(self._own, component(result, self._index))

    def assign_together(self, variable: keras.Variable, value: torch.Tensor) -> None:
        """Assigns the replicas' values to a variable, combined by the variable's aggregation."""
        is_equal = self.scope.writes_equal

        def assign(brought: Sequence[torch.Tensor]) -> None:
            total = brought[0]
            if not is_equal:
                [total] = self._shared.components.aggregates([variable], [brought])
            with torch.no_grad():
                keras_compat.stored_value(variable).copy_(total)

        self._meet(self.label(f"assignment to {variable.path}"), value.detach(), assign)

    def equal_writes(self) -> AbstractContextManager[None]:
        """Returns a context for code in which all replicas assign equal values to variables.

        So the replicas do not send these values to each other.
        """
        return replaced(self.scope, "writes_equal", True)

    def apply_gradients(
        self, apply: Apply, optimizer: keras.Optimizer, gradients: list[Any], variables: Variables
    ) -> None:
        """Lets the optimizer update the variables once, with the weighted sum of the gradients.

        In every process the last replica to arrive runs the update, in cross-replica context.
        """
        weights = self.scope.weights
        known = variables or keras_compat.optimized_variables(optimizer)
        if weights is not None:
            gradients = [
                None if gradient is None else weights.own_gradient(gradient, variable)
                for gradient, variable in zip(gradients, known, strict=True)
            ]
        # Torch's embeddings may have sparse gradients, which messages cannot contain.
        gradients = [None if one is None else one.to_dense() for one in gradients]

        def update(brought: Sequence[tuple[float, Gradients, list[keras.Variable] | None]]) -> None:
            all_weights, all_gradients, all_variables = zip(*brought, strict=True)
            weights = [numerics.weight_of_gradients(optimizer, weight) for weight in all_weights]
            check_same(all_gradients, all_variables)
            rules, scopes = self.scope.rules, self._shared.scopes[: self._count]
            if not optimizer.built and variables is not None:
                with self.no_replica(), keras.name_scope(optimizer.name):
                    optimizer.build(variables)
            reduced = None
            # Only a job has a reducer, and in a job a process has one replica. So `gradients` are
            # all gradients of this process.
            if isinstance(rules, FitRules) and rules.reducer is not None:
                reduced = rules.reducer.sum_up(optimizer, gradients, weights[0], known)
            if reduced is None:
                home = torch_device(self._shared.device)
                reduced = weighted_sum(all_gradients, weights, known, home)
                if self._shared.gradient_sum is not None:
                    reduced = self._shared.gradient_sum(optimizer, reduced, known)
            with self.no_replica():
                committed = rules.commit(scopes, sums=False)
                if self.scope.weights is not None:
                    reduced = sharded_optimizers.spread_infinite(optimizer, reduced)
                keras_compat.apply_combined_gradients(optimizer, reduced, variables)
            for scope in scopes:
                scope.refresh(committed)

        brought, label = (self.weight, gradients, variables), f"{optimizer.name}.apply"
        waits = not self.scope.rules.ends_with_update
        self._meet(self.label(label), brought, update, waits=waits)
        if self.scope.weights is not None:
            self.scope.weights.release()

    def differentiated_loss(self, loss: torch.Tensor, *, is_weighted: bool) -> torch.Tensor:
        """Returns the loss, marked if it was already multiplied by the replica's weight."""
        loss = self._plain(loss)
        return WeightedLoss.apply(self, loss) if is_weighted else loss

    def all_sum(
        self, tensors: Sequence[torch.Tensor], options: CommunicationOptions = DEFAULT_COMMUNICATION
    ) -> list[torch.Tensor]:
        """Returns each tensor's sum over the replicas; it is differentiable (see `GlobalSum`)."""
        if options is not DEFAULT_COMMUNICATION:
            checks.check_communication(options, "PyTorch, in all_reduce,", ())
        tensors = self._plain([as_tensor(tensor) for tensor in tensors])
        if not tensors:
            return []
        check_summable(tensors)
        if torch.compiler.is_compiling():
            return graph_ops.all_sum(tensors, self.number)
        return self._joint(list(GlobalSum.apply(self, self.label("all_sum"), 1.0, 1.0, *tensors)))

    @torch.compiler.disable
    def all_gather(self, tensor: torch.Tensor, axis: int = 0) -> torch.Tensor:
        """Returns the replicas' tensors, concatenated along an axis; this is differentiable."""
        own = self._plain(as_tensor(tensor))
        return self._joint(GlobalGather.apply(self, self.label("all_gather"), own, axis))

    def all_stack(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the replicas' tensors, stacked along a new first axis; this is differentiable."""
        if torch.compiler.is_compiling():
            replicas = self._count * self._shared.group.size
            return graph_ops.all_stack(tensor, self.number, replicas)
        own = self._plain(tensor)
        return self._joint(GlobalGather.apply(self, self.label("all_stack"), own, None))

    def all_moments(
        self, inputs: torch.Tensor, axes: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Returns mean and variance over all replicas, or None (see `batch_norm.rows_of`)."""
        weights = self.scope.weights
        rows = batch_norm.rows_of(inputs if weights is None else weights.plain(inputs), axes)
        if rows is None:
            return None
        found = batch_norm.Moments.apply(rows, self, self.label("all_moments"))
        return found if weights is None else weights.joint(found)

    def _plain(self, structure: Any) -> Any:
        weights = self.scope.weights
        return structure if weights is None else weights.plain(structure)

    def _joint(self, structure: Any) -> Any:
        weights = self.scope.weights
        return structure if weights is None else weights.joint(structure)

    def sum_gradient(self, label: str, gradient: torch.Tensor) -> torch.Tensor:
        """Sums the gradients of a value that all replicas share, weighted as in `GlobalSum`."""
        weight = self.gradient_weight
        label = f"gradient of {label}"
        # Without a second derivative, the sum needs no autograd function.
        sums = GlobalSum.apply if torch.is_grad_enabled() else scaled_sums
        [total] = sums(self, label, 1.0 / weight, weight, gradient)
        return total

    def exchange(self, label: str, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns the sums of the replicas' tensors. This replica may change its sums in place."""

        def sums(brought: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
            return self._shared.group.sums(
                [add_up(column) for column in zip(*brought, strict=True)]
            )

        shapes = [*map(tuple, map(torch.Tensor.size, tensors))]
        totals = self._meet(f"{label} of shapes {shapes}", tensors, sums)
        return [
            total.to(own.device, copy=self._shared.threads is not None)
            for total, own in zip(totals, tensors, strict=True)
        ]

    def combine(
        self,
        label: str,
        tensor: torch.Tensor,
        function: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.contiguous,
    ) -> torch.Tensor:
        """Stacks all replicas' tensors, which have the same shape, along a new axis 0.

        Returns the result of `function` for the stacked tensor, which each process computes once.
        """

        def combined(brought: Sequence[torch.Tensor]) -> torch.Tensor:
            here = torch.stack([part.to(brought[0].device) for part in brought])
            return function(self._shared.group.gather_alike(here).flatten(0, 1))

        result = self._meet(f"{label} of shape {tuple(tensor.shape)}", tensor, combined)
        return result.to(tensor.device, copy=self._shared.threads is not None)

    def concatenate(self, label: str, tensor: torch.Tensor, axis: int) -> tuple[torch.Tensor, int]:
        """Concatenates all replicas' tensors; also returns where this replica's tensor begins."""

        def concatenated(brought: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[int]]:
            here = torch.cat([part.to(brought[0].device) for part in brought], axis)
            [(whole, begin)] = self._shared.group.gather(label, [here], axis)
            begins = [begin]
            for part in brought:
                begins.append(begins[-1] + part.shape[axis])
            return whole, begins

        shape: list[object] = [*tensor.shape]
        shape[axis] = "any"
        whole, begins = self._meet(f"{label} of shape {tuple(shape)}", tensor, concatenated)
        return whole.to(tensor.device, copy=self._shared.threads is not None), begins[self._index]

    @contextlib.contextmanager
    def no_replica(self) -> Iterator[None]:
        """Lets a block run in cross-replica context, in the thread of the calling replica."""
        with (
            keras_compat.outside_stateless_scopes(),
            replica_scope(None),
            computing_on(self._shared.device),
        ):
            yield

    def _own(self, leaf: Any) -> Any:
        """Returns this replica's own copy of a tensor, or any other object unchanged."""
        return leaf.to(self.scope.device, copy=True) if isinstance(leaf, torch.Tensor) else leaf

    def label(self, name: str) -> str:
        """Returns a text that replicas compare: a collective's name and its number in the step."""
        self.calls += 1
        return f"{name} number {self.calls}"


def _keep_own(
    _label: str,
    value: _Value,
    combine: Callable[[Sequence[_Value]], _Result],
    *,
    waits: bool = True,
) -> _Result:
    """Takes the place of `ReplicaThreads.meet` if the process has only one replica."""
    return combine([value])


def collectives_here() -> TorchCollectives | None:
    """Returns the collectives of the replica whose code is running, None outside of replicas."""
    replica = current.replica
    collectives = None if replica is None else replica.collectives
    return collectives if isinstance(collectives, TorchCollectives) else None


class WeightedLoss(torch.autograd.Function):
    """Returns a loss unchanged, and marks it as already multiplied by the replica's weight.

    The weight is the replica's fraction of the rows of the global batch. In the backward pass of
    this loss all gradients already contain this factor, so `GlobalSum` must not multiply by it
    again. The mark belongs to one loss, because other losses of the same step may lack the factor.
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
        internals.CALL_AFTER_BACKWARD.value(lambda: setattr(replica, "gradient_weight", weight))
        return None, *gradients


def scaled_sums(
    replica: TorchCollectives, label: str, outer: float, inner: float, *tensors: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Returns ``outer * (sum over all replicas s of inner_s * x_s)`` for each tensor x."""
    scaled = tensors if inner == 1.0 else internals.MULTIPLY_EACH.value(tensors, inner)
    sums = replica.exchange(label, scaled)
    return tuple(sums if outer == 1.0 else internals.MULTIPLY_EACH.value(sums, outer))


class GlobalSum(torch.autograd.Function):
    """Computes ``outer * (sum over all replicas s of inner_s * x_s)`` on replica r.

    Later the gradients of replica r are multiplied by w_r, the replica's fraction of the rows, to
    match one device's numbers. So in the backward pass a gradient from replica s is multiplied by
    ``w_s / w_r`` on replica r. If all fractions are equal, the backward pass is a plain all-sum.
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
        """Returns the scaled sums of the tensors."""
        # On a GPU the backward pass runs in a thread that belongs to no replica, so ctx keeps the
        # replica for it.
        ctx.replica, ctx.label, ctx.outer, ctx.inner = replica, label, outer, inner
        replica.scope.sums_in_backward |= any(ctx.needs_input_grad)
        return scaled_sums(replica, label, outer, inner, *tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        """Returns the scaled sums of the gradients."""
        label = f"gradient of {ctx.label}"
        weight = ctx.replica.gradient_weight
        outer, inner = ctx.inner / weight, ctx.outer * weight
        sums = GlobalSum.apply(ctx.replica, label, outer, inner, *gradients)
        return None, None, None, None, *sums


class GlobalGather(torch.autograd.Function):
    """Concatenates the replicas' tensors along an axis; if the axis is None, stacks the tensors."""

    @staticmethod
    def forward(
        ctx: Any, replica: TorchCollectives, label: str, tensor: torch.Tensor, axis: int | None
    ) -> torch.Tensor:
        """Returns the tensors of all replicas, concatenated or stacked."""
        replica.scope.sums_in_backward |= any(ctx.needs_input_grad)
        ctx.replica, ctx.label, ctx.part = replica, label, None
        if axis is None:
            return replica.combine(label, tensor)
        gathered, begin = replica.concatenate(label, tensor, axis)
        ctx.part = axis, begin, tensor.shape[axis]
        return gathered

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        """Returns this replica's part of the summed gradients."""
        total = ctx.replica.sum_gradient(ctx.label, gradient)
        own = total[ctx.replica.rank] if ctx.part is None else total.narrow(*ctx.part)
        return None, None, own, None


def check_summable(tensors: Sequence[torch.Tensor]) -> None:
    """Refuses types that torch cannot add, and booleans, whose sum in torch is a logical or."""
    for tensor in tensors:
        name = str(tensor.dtype).removeprefix("torch.")
        checks.check_summable(name)
        if name.startswith("float8"):
            raise checks.not_summable(name, "float32")
        if name in ("uint16", "uint32", "uint64"):
            raise checks.not_summable(name, "int64")


def as_tensor(value: object) -> torch.Tensor:
    """Converts a number or an array to a tensor; returns a tensor unchanged."""
    return value if isinstance(value, torch.Tensor) else keras_compat.ops.convert_to_tensor(value)
