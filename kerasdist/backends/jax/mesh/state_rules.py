"""Which axes of a variable the devices of a mesh divide among them (`sharding=`)."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any, final

from jax.sharding import PartitionSpec

from kerasdist import keras_compat
from kerasdist.backends.base.variable_rules import is_on_read
from kerasdist.backends.jax.mesh import slots
from kerasdist.core.sharding import Sharding

WHOLE = PartitionSpec()


class StateRule(abc.ABC):
    """Says which axes of the mesh divide a variable.

    Attributes:
        gathers_weights: Whether weights are divided over the replicas, each of which needs them
            whole.
    """

    gathers_weights: bool

    @abc.abstractmethod
    def spec(self, variable: Any) -> PartitionSpec:
        """Returns the axes of the mesh that divide each axis of a variable."""

    @abc.abstractmethod
    def update_spec(self, weight: Any) -> PartitionSpec:
        """Returns the axes of the mesh that divide a weight's update, as they divide its slots."""


@final
class OverReplicas(StateRule):
    """The replicas divide the optimizer's variables, or these and the weights."""

    def __init__(self, sharding: Sharding, replicas: int, axis: str) -> None:
        self.gathers_weights = sharding.state == "full"
        self._sharding = sharding
        self._replicas = replicas
        self._axis = axis

    def spec(self, variable: Any) -> PartitionSpec:
        """Divides a variable that this rule is for."""
        return self.update_spec(variable) if self._is_for(variable) else WHOLE

    def update_spec(self, weight: Any) -> PartitionSpec:
        """Divides the largest axis that can be divided evenly."""
        divided = self._sharding.axis(tuple(weight.shape), self._replicas)
        return WHOLE if divided is None else PartitionSpec(*[None] * divided, self._axis)

    def _is_for(self, variable: Any) -> bool:
        # Not sync-on-read variables, of which each replica has a component. Nor unsigned integers:
        # they are bytes in transit, or the state of a random generator, which each draw reads.
        is_unsigned = keras_compat.stored_dtype(variable).startswith("uint")
        if is_on_read(variable) or is_unsigned:
            return False
        return self.gathers_weights or slots.is_slot(variable)


@final
class ByLayoutMap(StateRule):
    """A ``keras.distribution.LayoutMap`` says it, by the variable's path."""

    gathers_weights = False

    def __init__(self, layout_map: Any, sizes: Mapping[str, int], names: Mapping[str, str]) -> None:
        """Takes the map, the sizes of its mesh's axes, and their names in the strategy's mesh."""
        self._map = layout_map
        self._sizes = sizes
        self._names = names

    def spec(self, variable: Any) -> PartitionSpec:
        """Returns what the map has for the variable; for an optimizer's, for the weight's."""
        owner = slots.weight_of(variable)
        layout = self._map[owner.path]
        if layout is None or tuple(owner.shape) != tuple(variable.shape):
            return WHOLE
        pieces = [self._sizes.get(one, 1) for one in layout.axes]
        shape = tuple(variable.shape)
        if len(pieces) != len(shape) or any(
            size % count for size, count in zip(shape, pieces, strict=True)
        ):
            raise ValueError(
                "Expected an axis of the mesh, or None, for each axis of the variable, which must "
                f"divide it evenly. Received: layout={layout.axes} for the variable {owner.path!r} "
                f"of shape {shape}, on a mesh of {dict(self._sizes)}. Change the LayoutMap."
            )
        pairs = zip(layout.axes, pieces, strict=True)
        axes = [self._names[axis] if count > 1 else None for axis, count in pairs]
        return PartitionSpec(*axes) if any(axes) else WHOLE  # JAX leaves out axes of size 1

    def update_spec(self, weight: Any) -> PartitionSpec:
        """Returns what the map has for the weight."""
        return self.spec(weight)
