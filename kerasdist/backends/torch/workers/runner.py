"""User functions on many workers, one replica here, and how values cross over."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

import keras
import torch

from kerasdist import keras_seam, ownership
from kerasdist.backends.checks import checked_axis
from kerasdist.backends.runner import Runner
from kerasdist.backends.torch.components import require_aggregate
from kerasdist.backends.torch.differentiable import check_summable
from kerasdist.backends.torch.functions import current_step
from kerasdist.backends.torch.placing import on_device, required_tensor
from kerasdist.backends.torch.reads import require_outside
from kerasdist.backends.torch.workers.loop_state import has_component
from kerasdist.backends.torch.workers.replicas import WorkerReplicaSet
from kerasdist.collectives import CommunicationOptions, ReduceOp
from kerasdist.input.dividing import divided
from kerasdist.structures import map_leaves
from kerasdist.values import DistributedValues

if TYPE_CHECKING:
    from kerasdist.strategy import Strategy


@final
class WorkerRunner(Runner):
    """Runs a function in the one replica of this worker; a value's one component is itself."""

    def __init__(self, replica_set: WorkerReplicaSet) -> None:
        """Makes the runner.

        Args:
            replica_set: The replicas.
        """
        self._replica_set = replica_set
        self._group = replica_set.group
        self._loops = replica_set.loops
        self.places_ahead = replica_set.group.device.type != "cpu"

    @torch.compiler.disable
    def run(
        self,
        strategy: Strategy,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Calls the function in this worker's replica, with its components.

        Args:
            strategy: The strategy.
            function: The function.
            args: Positional arguments.
            kwargs: Keyword arguments.

        Raises:
            ScopeError: In a function that `kerasdist.value_and_grad` differentiates.
        """
        require_outside(keras_seam.stateless_scope())
        outer = current_step()
        if outer is not None:
            outer.warn_if_compiled()
        replicas = self._replica_set
        replicas.begin_step()
        own_args, own_kwargs = self._component(list(args)), self._component(dict(kwargs))
        with replicas.replica(strategy, share=None):
            replicas.collectives.begin(1.0, self._loops)
            with self._loops.running():
                return function(*own_args, **own_kwargs)

    @torch.no_grad()
    def reduce(self, op: ReduceOp, value: Any, axis: int | None) -> torch.Tensor:
        """Returns the sum or mean over the workers, and along an axis of their components.

        Args:
            op: The operation.
            value: This worker's component.
            axis: None, or the axis along which components are reduced too.

        Raises:
            ValueError: If the components have no such axis.
            ReplicaError: If they differ in shape.
        """
        part = self._tensor(value)
        check_summable([part])
        count = torch.ones((), dtype=torch.int64, device=part.device)
        if axis is not None:
            axis = checked_axis(part, axis)
            count *= part.shape[axis]
            # Not in int64, which torch adds smaller integers in.
            part = part.sum(axis, dtype=part.dtype)
        if op is ReduceOp.SUM:
            [total] = self._group.checked_sums("reduce", [part])
            return total
        total, count = self._group.checked_sums("reduce", [part, count])
        return (total / count).to(total.dtype)

    @torch.no_grad()
    def gather(self, value: Any, axis: int) -> torch.Tensor:
        """Returns the workers' components one after another.

        Args:
            value: This worker's component.
            axis: The axis.

        Raises:
            ValueError: If the component has no such axis.
            ReplicaError: If the components differ in another one.
        """
        part = self._tensor(value)
        axis = checked_axis(part, axis)
        return torch.cat([one for [one] in self._group.gather("gather", [part], axis)], axis)

    def reduce_to(
        self, op: ReduceOp, values: Sequence[Any], options: CommunicationOptions
    ) -> list[Any]:
        """Returns the sum or mean of each value over the workers.

        Args:
            op: The operation.
            values: This worker's components.
            options: Not needed: the strategy's say how to communicate.
        """
        del options
        return [self.reduce(op, value, None) for value in values]

    def broadcast(self, tensor: Any) -> torch.Tensor:
        """Returns the chief's tensor, on every worker.

        Args:
            tensor: The tensor.
        """
        own = self._tensor(tensor)
        self._group.shapes("broadcast_to", [own], None)
        [chiefs] = self._group.from_chief([own])
        return chiefs

    def update(
        self,
        variable: Any,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> list[Any]:
        """Calls the function for the variable, or for this worker's component of it.

        Args:
            variable: A Keras variable.
            function: What to do with it.
            args: Positional arguments.
            kwargs: Keyword arguments.
        """
        own_args, own_kwargs = self._component(list(args)), self._component(dict(kwargs))
        if not has_component(variable):
            with keras_seam.outside_stateless_scopes():
                return [function(variable, *own_args, **own_kwargs)]
        with keras.StatelessScope([(variable, self._loops.component(variable))]) as scope:
            result = function(variable, *own_args, **own_kwargs)
        component = scope.state_mapping[id(variable)].detach().clone()
        [aggregate] = self._loops.aggregates([variable], [component])
        self._loops.keep(variable, component, aggregate)
        return [result]

    def per_replica(self, values: Sequence[Any]) -> Any:
        """Returns this worker's component, arrays as tensors on its device.

        Args:
            values: One structure: this worker's.

        Raises:
            ValueError: If there are others.
        """
        if len(values) != 1:
            raise ValueError(
                "Expected one component, that of this worker's replica. "
                f"Received: {len(values)} components, {values!r:.200}."
            )
        device = self._group.device
        return map_leaves(lambda leaf: on_device(device, leaf), values[0])

    def divide(self, batch: Any, replicas: int) -> Any:
        """Returns this worker's piece of a global batch.

        Args:
            batch: Arrays with the examples along axis 0, in any structure.
            replicas: How many pieces.
        """
        return self.per_replica([divided(batch, replicas)[self._group.rank]])

    def local_results(self, value: Any) -> tuple[Any, ...]:
        """Returns a tuple of this worker's component.

        Args:
            value: A value, a variable, or anything else.
        """
        if isinstance(value, DistributedValues):
            return value.values
        return (self._loops.component(value),) if isinstance(value, keras.Variable) else (value,)

    def read(self, variable: Any) -> torch.Tensor:
        """Returns the value of a variable; the aggregate of one that has components.

        Args:
            variable: A Keras variable.

        Raises:
            ValueError: If there is no aggregate.
        """
        require_aggregate(variable)
        return keras_seam.stored_value(variable).detach().clone()

    def created(self, variable: Any) -> bool:
        """Returns whether a variable was made in the scope of a strategy over these replicas.

        Args:
            variable: A Keras variable.
        """
        strategy = ownership.strategy_of(variable)
        return strategy is not None and strategy.replica_set is self._replica_set

    def _component(self, structure: Any) -> Any:
        """What this worker's replica gets of a structure, tensors on its device."""
        device = self._group.device

        def component(leaf: Any) -> Any:
            if isinstance(leaf, DistributedValues):
                [leaf] = leaf.values
            return leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf

        return map_leaves(component, structure)

    def _tensor(self, value: Any) -> torch.Tensor:
        if isinstance(value, keras.Variable):
            return self._loops.component(value)
        return required_tensor(self._component(value))
