"""User functions on the replicas of a strategy, and how values cross over."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

import keras
import torch

from kerasdist import keras_seam, ownership
from kerasdist.backends.checks import check_shapes, checked_axis
from kerasdist.backends.runner import Runner
from kerasdist.backends.torch.components import is_on_read, require_aggregate
from kerasdist.backends.torch.differentiable import check_summable
from kerasdist.backends.torch.functions import current_step
from kerasdist.backends.torch.pace import LoopPace
from kerasdist.backends.torch.pieces import Part
from kerasdist.backends.torch.placing import on_device, required_tensor, torch_device
from kerasdist.backends.torch.reads import require_outside
from kerasdist.backends.torch.replicas import TorchReplicaSet
from kerasdist.collectives import CommunicationOptions, ReduceOp
from kerasdist.structures import map_leaves, transpose
from kerasdist.values import DistributedValues, Mirrored, PerReplica, per_replica

if TYPE_CHECKING:
    from kerasdist.strategy import Strategy


@final
class TorchRunner(Runner):
    """Runs a function in the thread of each replica; a distributed value is a tuple of tensors.

    Replicas on the CPU take turns, as a rule (see `kerasdist.backends.torch.pace.LoopPace`).
    """

    def __init__(self, replica_set: TorchReplicaSet) -> None:
        """Makes the runner.

        Args:
            replica_set: The replicas, at least two.
        """
        self._replica_set = replica_set
        self._devices = [torch_device(device) for device in replica_set.devices]
        self._home = torch_device(replica_set.variable_devices[0])
        self._components = replica_set.components
        self._pace = LoopPace(on_cpu=replica_set.on_cpu)
        self.places_ahead = not replica_set.on_cpu

    @torch.compiler.disable
    def run(
        self,
        strategy: Strategy,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Calls the function once a replica, each with its components.

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

        def step(call: tuple[Sequence[Any], Mapping[str, Any]]) -> Any:
            return function(*call[0], **call[1])

        arguments = [
            Part((self._component(list(args), rank), self._component(dict(kwargs), rank)))
            for rank in range(len(self._devices))
        ]
        take_turns = functools.partial(self._pace.of_run, function, outer is not None)
        return per_replica(self._replica_set.run(strategy, step, arguments, take_turns))

    @torch.no_grad()
    def reduce(self, op: ReduceOp, value: Any, axis: int | None) -> torch.Tensor:
        """Returns the sum or mean of a value, and along an axis of its components.

        Args:
            op: The operation.
            value: A distributed value, or what stands for equal components.
            axis: None, or the axis along which components are reduced too.

        Raises:
            ValueError: If the components have no such axis.
            ShapeError: If they differ in shape.
        """
        parts = self._tensors(value)
        check_summable(parts)
        count = len(parts)
        if axis is not None:
            axes = [checked_axis(part, axis) for part in parts]
            count = sum(part.shape[i] for part, i in zip(parts, axes, strict=True))
            # Not in int64, which torch adds smaller integers in.
            parts = [p.sum(i, dtype=p.dtype) for p, i in zip(parts, axes, strict=True)]
        check_shapes([part.shape for part in parts])
        total = parts[0].clone() if len(parts) == 1 else parts[0] + parts[1]
        for part in parts[2:]:
            total += part
        return total if op is ReduceOp.SUM else (total / count).to(total.dtype)

    @torch.no_grad()
    def gather(self, value: Any, axis: int) -> torch.Tensor:
        """Returns the components one after another.

        Args:
            value: A distributed value.
            axis: The axis.

        Raises:
            ValueError: If the components have no such axis.
            ShapeError: If they differ in another one.
        """
        parts = self._tensors(value)
        axes = [checked_axis(part, axis) for part in parts]
        check_shapes([part.shape for part in parts], axes[0])
        return torch.cat(parts, axes[0])

    def reduce_to(
        self, op: ReduceOp, values: Sequence[Any], options: CommunicationOptions
    ) -> list[Any]:
        """Returns the sum or mean of each value on every replica's device.

        Args:
            op: The operation.
            values: Distributed values.
            options: Not needed: the tensors are added where they are.
        """
        del options
        return [self.broadcast(self.reduce(op, value, None)) for value in values]

    def broadcast(self, tensor: Any) -> Mirrored:
        """Returns a tensor on every replica's device.

        Args:
            tensor: The tensor.
        """
        tensor = required_tensor(tensor).detach()
        return Mirrored(tuple(tensor.to(device) for device in self._devices))

    def update(
        self,
        variable: Any,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> list[Any]:
        """Calls the function for the variable; for one with components, once for each of them.

        Args:
            variable: A Keras variable.
            function: What to do with it.
            args: Positional arguments.
            kwargs: Keyword arguments.
        """

        def call(rank: int) -> Any:
            return function(
                variable,
                *self._component(list(args), rank),
                **self._component(dict(kwargs), rank),
            )

        if not is_on_read(variable):
            with keras_seam.outside_stateless_scopes():
                return [call(0)]
        results, values = [], []
        for rank, component in enumerate(self._replica_components(variable)):
            with keras.StatelessScope([(variable, component)]) as scope:
                results.append(call(rank))
            values.append(scope.state_mapping[id(variable)].detach().clone())
        self._components.keep(variable, values)
        return results

    def per_replica(self, values: Sequence[Any]) -> Any:
        """Returns a value with these components, arrays as tensors on the replica's device.

        Args:
            values: One structure a replica.
        """
        self._check_count(len(values), values)
        placed = [
            map_leaves(lambda leaf: on_device(device, leaf), structure)  # noqa: B023
            for device, structure in zip(self._devices, values, strict=True)
        ]
        return transpose(placed, _values)

    def local_results(self, value: Any) -> tuple[Any, ...]:
        """Returns the components of one value; of anything else a tuple of one.

        Args:
            value: A distributed value, a variable, or anything else.
        """
        if isinstance(value, DistributedValues):
            return value.values
        return self._replica_components(value) if isinstance(value, keras.Variable) else (value,)

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

    def _replica_components(self, variable: Any) -> tuple[torch.Tensor, ...]:
        """What each replica would read of a variable."""
        found = [
            self._components.component(variable, rank, device)
            for rank, device in enumerate(self._devices)
        ]
        return tuple(
            (keras_seam.stored_value(variable) if one is None else one).detach().to(device)
            for one, device in zip(found, self._devices, strict=True)
        )

    def _component(self, structure: Any, rank: int) -> Any:
        """What one replica gets of a structure, tensors on its device."""
        device = self._devices[rank]

        def component(leaf: Any) -> Any:
            if isinstance(leaf, DistributedValues):
                values = leaf.values
                self._check_count(len(values), values)
                leaf = values[rank]
            return leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf

        return map_leaves(component, structure)

    def _tensors(self, value: Any) -> list[torch.Tensor]:
        """The components of a value, on the first device."""
        if isinstance(value, keras.Variable):
            parts: Sequence[Any] = self._replica_components(value)
        elif isinstance(value, DistributedValues):
            parts = value.values
            self._check_count(len(parts), parts)
        else:
            parts = [value] * len(self._devices)
        return [required_tensor(part).to(self._home) for part in parts]

    def _check_count(self, count: int, values: Any) -> None:
        if count != len(self._devices):
            raise ValueError(
                f"Expected one component for each of the strategy's {len(self._devices)} replicas. "
                f"Received: {count} components, {values!r:.200}. Make distributed values with the "
                "strategy that uses them."
            )


def _values(leaves: Sequence[Any]) -> PerReplica | None:
    return None if all(leaf is None for leaf in leaves) else PerReplica(tuple(leaves))
