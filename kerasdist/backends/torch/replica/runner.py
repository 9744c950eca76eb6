"""Runs user functions on the replicas of a strategy, and collectives on distributed values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

import keras
import torch

from kerasdist import keras_compat
from kerasdist.api.collectives import CommunicationOptions, ReduceOp
from kerasdist.api.values import DistributedValues, Mirrored, PerReplica, per_replica
from kerasdist.backends.base.checks import check_shapes, checked_axis
from kerasdist.backends.base.runner import Runner
from kerasdist.backends.base.variable_rules import is_on_read, require_aggregate
from kerasdist.backends.torch.fit.batches import Part
from kerasdist.backends.torch.replica.collectives import check_summable
from kerasdist.backends.torch.replica.functions import current_step
from kerasdist.backends.torch.replica.placing import moved, on_device, required_tensor, torch_device
from kerasdist.backends.torch.replica.replicas import TorchReplicaSet
from kerasdist.backends.torch.state import shards
from kerasdist.backends.torch.state.reads import require_outside
from kerasdist.core import ownership
from kerasdist.core.structures import map_leaves, transpose
from kerasdist.input.sharding import split_batch

if TYPE_CHECKING:
    from kerasdist.api.strategy import Strategy


@final
class TorchRunner(Runner):
    """Runs a function in each replica of this process.

    A distributed value is a tuple of tensors; with one component it is the tensor itself.
    """

    def __init__(self, replica_set: TorchReplicaSet) -> None:
        self._replica_set = replica_set
        self._devices = replica_set.torch_devices
        self._group = replica_set.group
        self._home = torch_device(replica_set.variable_devices[0])
        self._components = replica_set.components
        self.places_ahead = not replica_set.on_cpu

    @torch.compiler.disable
    def run(
        self,
        strategy: Strategy,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Calls the function once per replica, each with its components of the arguments."""
        require_outside(keras_compat.stateless_scope())
        outer = current_step()
        if outer is not None:
            outer.warn_if_compiled()

        def step(call: tuple[Sequence[Any], Mapping[str, Any]]) -> Any:
            return function(*call[0], **call[1])

        self._replica_set.begin_step()
        arguments = [
            Part((self._component(list(args), index), self._component(dict(kwargs), index)))
            for index in range(len(self._devices))
        ]
        rules = self._replica_set.loop_rules
        return per_replica(self._replica_set.run(strategy, step, arguments, rules))

    @torch.no_grad()
    def reduce(self, op: ReduceOp, value: Any, axis: int | None) -> torch.Tensor:
        """Returns the sum or mean of a value's components, and along an axis of each if given."""
        parts = self._tensors(value)
        check_summable(parts)
        count = len(parts)
        if axis is not None:
            axes = [checked_axis(part, axis) for part in parts]
            count = sum(part.shape[i] for part, i in zip(parts, axes, strict=True))
            # `dtype`, as torch would sum smaller integers in int64.
            parts = [p.sum(i, dtype=p.dtype) for p, i in zip(parts, axes, strict=True)]
        check_shapes([part.shape for part in parts])
        here = parts[0].clone() if len(parts) == 1 else parts[0] + parts[1]
        for part in parts[2:]:
            here += part
        if op is ReduceOp.SUM:
            [total] = self._group.checked_sums("reduce", [here])
            return total
        counted = torch.full((), count, device=here.device)  # no copy from the host
        total, everyones = self._group.checked_sums("reduce", [here, counted])
        return (total / everyones).to(total.dtype)

    @torch.no_grad()
    def gather(self, value: Any, axis: int) -> torch.Tensor:
        """Returns the components of a value, concatenated along an axis."""
        parts = self._tensors(value)
        axes = [checked_axis(part, axis) for part in parts]
        check_shapes([part.shape for part in parts], axes[0])
        here = torch.cat(parts, axes[0])
        return torch.cat([one for [one] in self._group.gather("gather", [here], axes[0])], axes[0])

    def reduce_to(
        self, op: ReduceOp, values: Sequence[Any], options: CommunicationOptions
    ) -> list[Any]:
        """Returns the sum or mean of each value on every replica's device."""
        del options
        return [self._mirrored(self.reduce(op, value, None)) for value in values]

    def broadcast(self, tensor: Any) -> Any:
        """Returns the chief's tensor on every replica's device."""
        own = required_tensor(tensor).detach().to(self._home)
        self._group.check_alike("broadcast_to", [own])
        [chiefs] = self._group.from_chief([own])
        return self._mirrored(chiefs)

    def update(
        self,
        variable: Any,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> list[Any]:
        """Calls the function once for a mirrored variable, once per component of another."""

        def call(index: int) -> Any:
            return function(
                variable,
                *self._component(list(args), index),
                **self._component(dict(kwargs), index),
            )

        if not is_on_read(variable):
            with keras_compat.outside_stateless_scopes():
                return [call(0)]
        results, values = [], []
        for index, component in enumerate(self._replica_components(variable)):
            with keras.StatelessScope([(variable, component)]) as scope:
                results.append(call(index))
            values.append(scope.state_mapping[id(variable)].detach().clone())
        self._components.keep([variable], [values])
        return results

    def per_replica(self, values: Sequence[Any]) -> Any:
        """Returns a value with these components, arrays as tensors on their replicas' devices."""
        self._check_count(len(values), values)
        placed = [
            map_leaves(lambda leaf: on_device(device, leaf), structure)  # noqa: B023
            for device, structure in zip(self._devices, values, strict=True)
        ]
        return placed[0] if len(placed) == 1 else transpose(placed, _values)

    def divide(self, batch: Any, replicas: int) -> Any:
        """Returns a value whose components are this process's pieces of a global batch."""
        local = self._replica_set.local_replicas
        return self.per_replica(split_batch(batch, replicas)[local.start : local.stop])

    def local_results(self, value: Any) -> tuple[Any, ...]:
        """Returns the components of a value or variable; anything else as a tuple of one."""
        if isinstance(value, DistributedValues):
            return value.values
        return self._replica_components(value) if isinstance(value, keras.Variable) else (value,)

    def read(self, variable: Any) -> torch.Tensor:
        """Returns the value of a variable, which is the aggregate if it has components."""
        require_aggregate(variable)
        return shards.whole_value(variable).detach().clone()

    def created(self, variable: Any) -> bool:
        """Returns whether a variable was made in the scope of a strategy over these replicas."""
        strategy = ownership.strategy_of(variable)
        return strategy is not None and strategy.replica_set is self._replica_set

    def _replica_components(self, variable: Any) -> tuple[torch.Tensor, ...]:
        """Returns, for each replica of this process, the value that it would read of a variable."""
        found = [
            self._components.component(variable, rank, device)
            for rank, device in zip(self._replica_set.local_replicas, self._devices, strict=True)
        ]
        return tuple(
            (shards.whole_value(variable) if one is None else one).detach().to(device)
            for one, device in zip(found, self._devices, strict=True)
        )

    def _component(self, structure: Any, index: int) -> Any:
        """Returns a structure with one replica's components of its values, on its device."""
        device = self._devices[index]

        def component(leaf: Any) -> Any:
            if isinstance(leaf, DistributedValues):
                values = leaf.values
                self._check_count(len(values), values)
                leaf = values[index]
            return moved(device, leaf)

        return map_leaves(component, structure)

    def _tensors(self, value: Any) -> list[torch.Tensor]:
        """Returns the components of a value, on the first device."""
        if isinstance(value, keras.Variable):
            parts: Sequence[Any] = self._replica_components(value)
        elif isinstance(value, DistributedValues):
            parts = value.values
            self._check_count(len(parts), parts)
        else:
            parts = [value] * len(self._devices)
        return [required_tensor(part).to(self._home) for part in parts]

    def _mirrored(self, tensor: torch.Tensor) -> Any:
        if len(self._devices) == 1:
            return tensor
        return Mirrored(tuple(tensor.to(device) for device in self._devices))

    def _check_count(self, count: int, values: Any) -> None:
        if count != len(self._devices):
            raise ValueError(
                f"Expected one component for each of the {len(self._devices)} replicas here. "
                f"Received: {count} components, {values!r:.200}. Make distributed values with the "
                "strategy that uses them."
            )


def _values(leaves: Sequence[Any]) -> PerReplica | None:
    return None if all(leaf is None for leaf in leaves) else PerReplica(tuple(leaves))
