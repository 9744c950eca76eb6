"""What replicas hold of a variable that is not equal on all of them, kept from run to run.

The variable's own value is always the aggregate, so that whoever reads it outside of replicas, and
saving, need nothing of this. The components stand beside it, and count for as long as the value is
the aggregate that they were stored with: whoever assigns to the variable makes them void, and the
next run derives them anew, as ``tf.distribute`` does on assignment and on restoring.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

from jax import numpy as jnp

from kerasdist import keras_seam
from kerasdist.backends.jax.placement import MeshPlacement


@dataclass(frozen=True)
class Components:
    """Components of one variable.

    Attributes:
        stack: Array of shape ``(replicas, ...)``, a component on each device.
        aggregate: The variable's value at that time.
    """

    stack: Any
    aggregate: Any


_of_variable: dict[int, tuple[weakref.ref[Any], Components]] = {}


def remember(variable: Any, components: Components) -> None:
    """Keeps a variable's components.

    Args:
        variable: A Keras variable, whose value has just become the aggregate.
        components: What the replicas hold.
    """
    key = id(variable)
    known = _of_variable.get(key)
    if known is None:
        owner = weakref.ref(variable, lambda _: _of_variable.pop(key, None))
    else:
        owner = known[0]
    _of_variable[key] = owner, components


def recall(variable: Any) -> Components | None:
    """Returns a variable's components, None if it has none or was assigned to since.

    Args:
        variable: A Keras variable.
    """
    known = _of_variable.get(id(variable))
    if known is None or known[0]() is not variable:
        return None
    components = known[1]
    if keras_seam.stored_value(variable) is components.aggregate:
        return components
    del _of_variable[id(variable)]
    return None


def diverged(keys: Any) -> list[int]:
    """Returns which of some variables have components, by the variables' ids.

    Args:
        keys: A dictionary or set of ids of living variables.
    """
    return [key for key in _of_variable if key in keys] if _of_variable else []


def is_read_by_sum(variable: Any) -> bool:
    """Returns whether a variable's value is the sum of what the replicas hold.

    Args:
        variable: A Keras variable.
    """
    return variable.synchronization == "on_read" and variable.aggregation == "sum"


def derived(variable: Any, aggregate: Any, replicas: int) -> Any:
    """Returns components, along a first axis, that aggregate to a value.

    Args:
        variable: A Keras variable.
        aggregate: Its value.
        replicas: How many components.
    """
    each = divided(aggregate, replicas) if is_read_by_sum(variable) else aggregate
    return jnp.broadcast_to(each, (replicas, *each.shape))


def divided(value: Any, replicas: int) -> Any:
    """Returns a value over the number of replicas, in its own type.

    Args:
        value: An array.
        replicas: How many replicas.
    """
    return (value / replicas).astype(value.dtype)


def stack_on(variable: Any, place: MeshPlacement) -> Any:
    """Returns what the replicas hold of a variable, on their devices.

    Args:
        variable: A Keras variable.
        place: The devices.
    """
    components = recall(variable)
    if components is not None and components.stack.sharding == place.pieces:
        return components.stack
    value = keras_seam.stored_value(variable)
    return place.spread(derived(variable, value, place.layout.replicas))
