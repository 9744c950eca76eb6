"""Keeps the components of variables, one per replica, from one `run` to the next.

A variable's own value, which users read outside of replicas and which Keras saves, is always the
aggregate of its components. The components are valid as long as the variable holds the same array
as when they were stored. After an assignment to the variable, the components are invalid, and the
next `run` derives new components from the value. ``tf.distribute`` does the same when a variable is
assigned or restored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jax import numpy as jnp

from kerasdist import keras_compat
from kerasdist.backends.base.variable_rules import is_sum_on_read, shares_of_sum
from kerasdist.backends.jax.mesh import sharded_state
from kerasdist.backends.jax.mesh.arrays import local_copy
from kerasdist.backends.jax.mesh.placement import Placement
from kerasdist.core.ownership import VariableTable

if TYPE_CHECKING:
    import jax
    import keras


@dataclass(frozen=True)
class Components:
    """The components of one variable on all replicas, and the value that belongs to them.

    Attributes:
        stack: An array of shape ``(replicas, ...)``, with one component per replica.
        aggregate: The variable's own value when the components were stored.
    """

    stack: jax.Array
    aggregate: jax.Array


_of_variable: VariableTable[Components] = VariableTable()


def remember(variable: keras.Variable, components: Components) -> None:
    """Stores a variable's components."""
    _of_variable.put(variable, components)


def recall(variable: keras.Variable) -> Components | None:
    """Returns a variable's components; None if it has none, or if it was assigned a value since."""
    components = _of_variable.get(variable)
    if components is None or keras_compat.stored_value(variable) is components.aggregate:
        return components
    _of_variable.discard(variable)
    return None


def diverged(variables: Mapping[int, keras.Variable]) -> set[int]:
    """Returns the ids of those of the given variables that have one component per replica."""
    known = [one for one in _of_variable.variables() if id(one) in variables]
    return {id(one) for one in known if recall(one) is not None}


def derived(variable: keras.Variable, aggregate: jax.Array, replicas: int) -> jax.Array:
    """Derives a variable's components from their aggregate; stacks them along a new first axis."""
    first = each = aggregate
    if is_sum_on_read(variable):
        first, each = shares_of_sum(aggregate, replicas)
    if first is each:
        return jnp.broadcast_to(each, (replicas, *each.shape))
    others = jnp.broadcast_to(each, (replicas - 1, *each.shape))
    return jnp.concatenate([first[None], others])


def stack_on(variable: keras.Variable, place: Placement) -> jax.Array:
    """Returns the replicas' components of a variable, stacked, each on its replica's devices."""
    components = recall(variable)
    if components is not None and components.stack.sharding == place.rows:
        return components.stack
    value = sharded_state.whole(variable, keras_compat.stored_value(variable))
    return place.put(derived(variable, local_copy(value), place.layout.replicas), place.rows)
