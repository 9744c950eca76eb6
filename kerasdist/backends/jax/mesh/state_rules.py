"""Which axes of a variable the devices of a mesh shard (`sharding=`), and whose it is."""

from __future__ import annotations

import abc
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, final

from jax.sharding import PartitionSpec

from kerasdist import keras_compat
from kerasdist.backends.base.variable_rules import is_on_read
from kerasdist.core.ownership import VariableTable
from kerasdist.core.sharding import Sharding

if TYPE_CHECKING:
    import keras

WHOLE = PartitionSpec()

# An optimizer's variable, and the weight that it belongs to; itself, if it belongs to none.
_weights: VariableTable[Any] = VariableTable()


@final
class _Making(threading.local):
    """The weight for which an optimizer makes a variable in this thread."""

    weight: Any = None


_making = _Making()


def install() -> None:
    """Installs the hook where optimizers make variables for weights."""
    keras_compat.install(slot=_from_weight)


def _from_weight(
    original: Callable[..., Any],
    optimizer: keras.Optimizer,
    reference_variable: keras.Variable,  # Keras's name, by which some optimizers pass it
    *args: object,
    **kwargs: object,
) -> Any:
    before, _making.weight = _making.weight, reference_variable
    try:
        return original(optimizer, reference_variable, *args, **kwargs)
    finally:
        _making.weight = before


def note_new(variable: keras.Variable) -> None:
    """Notes a variable that is about to be made, if an optimizer makes it."""
    if keras_compat.is_of_optimizer():
        _note(variable, _making.weight)


def note_all(optimizer: keras.Optimizer, weights: Iterable[keras.Variable]) -> None:
    """Notes the variables of an optimizer that was built before the first strategy was made."""
    unknown = [one for one in optimizer.variables if not is_slot(one)]
    if unknown:
        owners = keras_compat.referenced_variables(optimizer, weights)
        for variable, weight in zip(optimizer.variables, owners, strict=True):
            if not is_slot(variable):
                _note(variable, weight)


def _note(variable: keras.Variable, weight: keras.Variable | None) -> None:
    # No entry refers to its own variable, which could never be collected then.
    _weights.put(variable, (None if weight is variable else weight,))


def is_slot(variable: keras.Variable) -> bool:
    """Returns whether a variable belongs to an optimizer."""
    return _weights.get(variable) is not None


def weight_of(variable: keras.Variable) -> Any:
    """Returns the weight that an optimizer's variable belongs to; else the variable itself."""
    known = _weights.get(variable)
    return variable if known is None or known[0] is None else known[0]


class StateRule(abc.ABC):
    """Says which axes of the mesh divide a variable.

    Attributes:
        gathers_weights: Whether weights are sharded over the replicas, each of which needs them
            whole.
    """

    gathers_weights: bool

    @abc.abstractmethod
    def spec(self, variable: keras.Variable) -> PartitionSpec:
        """Returns the axes of the mesh that divide each axis of a variable."""

    @abc.abstractmethod
    def update_spec(self, weight: keras.Variable) -> PartitionSpec:
        """Returns the axes of the mesh that shard a weight's update, and its slots."""


@final
class OverReplicas(StateRule):
    """The replicas divide the optimizer's variables, or these and the weights."""

    def __init__(self, sharding: Sharding, replicas: int, axis: str) -> None:
        self.gathers_weights = sharding.state == "full"
        self._sharding = sharding
        self._replicas = replicas
        self._axis = axis

    def spec(self, variable: keras.Variable) -> PartitionSpec:
        """Divides a variable that this rule is for."""
        return self.update_spec(variable) if self._is_for(variable) else WHOLE

    def update_spec(self, weight: keras.Variable) -> PartitionSpec:
        """Shards the largest axis that the replicas divide evenly."""
        axis = self._sharding.axis(tuple(weight.shape), self._replicas)
        return WHOLE if axis is None else PartitionSpec(*[None] * axis, self._axis)

    def _is_for(self, variable: keras.Variable) -> bool:
        # Not sync-on-read variables, of which each replica has a component. Nor unsigned integers:
        # they are bytes in transit, or the state of a random generator, which each draw reads.
        is_unsigned = keras_compat.stored_dtype(variable).startswith("uint")
        if is_on_read(variable) or is_unsigned:
            return False
        return self.gathers_weights or is_slot(variable)


@final
class ByLayoutMap(StateRule):
    """A ``keras.distribution.LayoutMap`` says it, by the variable's path."""

    gathers_weights = False

    def __init__(self, layout_map: Any, sizes: Mapping[str, int], names: Mapping[str, str]) -> None:
        """Takes the map, the sizes of its mesh's axes, and their names in the strategy's mesh."""
        self._map = layout_map
        self._sizes = sizes
        self._names = names

    def spec(self, variable: keras.Variable) -> PartitionSpec:
        """Returns what the map has for the variable; for an optimizer's, for the weight's."""
        owner = weight_of(variable)
        layout = self._map[owner.path]
        if layout is None or tuple(owner.shape) != tuple(variable.shape):
            return WHOLE
        counts = [self._sizes.get(one, 1) for one in layout.axes]
        shape = tuple(variable.shape)
        if len(counts) != len(shape) or any(
            size % count for size, count in zip(shape, counts, strict=True)
        ):
            raise ValueError(
                "Expected an axis of the mesh, or None, for each axis of the variable, which must "
                f"divide it evenly. Received: layout={layout.axes} for the variable {owner.path!r} "
                f"of shape {shape}, on a mesh of {dict(self._sizes)}. Change the LayoutMap."
            )
        pairs = zip(layout.axes, counts, strict=True)
        axes = [self._names[axis] if count > 1 else None for axis, count in pairs]
        return PartitionSpec(*axes) if any(axes) else WHOLE  # JAX leaves out axes of size 1

    def update_spec(self, weight: keras.Variable) -> PartitionSpec:
        """Returns what the map has for the weight."""
        return self.spec(weight)
