"""Keeps an optimizer's variables in the host's memory between updates (`offload="optimizer"`).

A step takes and returns these variables as arrays in page-locked memory of the host, which a device
can read and write by itself. When the optimizer's code reads a variable, the step copies the
variable to the devices. An update divides the weights into groups of a few weights each. To save
memory of the devices, the update must copy the variables of one group after those of another. An
optimization barrier cannot enforce this order, because XLA drops barriers between copies. XLA would
then start all copies when the step begins, and the devices would hold all variables at once.

So a copy is made to depend on a weight that was updated two groups earlier. A variable is copied as
two slices, and the index where the first slice begins is computed from that weight. This index is
always 0, but XLA cannot know that before the program runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, final

import jax
import keras
from jax import numpy as jnp
from jax.sharding import NamedSharding, Sharding

from kerasdist import keras_compat
from kerasdist.backends.jax.mesh.arrays import HOST, in_device_memory
from kerasdist.core.ownership import weight_of
from kerasdist.core.sharding import GROUP_BYTES

_copies: ContextVar[_Copies | None] = ContextVar("copies", default=None)


def to_device(values: Sequence[Any], shardings: Sequence[NamedSharding]) -> list[Any]:
    """Returns a step's values, after copying those in the host's memory to the devices."""
    return [
        jax.device_put(value, in_device_memory(how)) if how.memory_kind == HOST else value
        for value, how in zip(values, shardings, strict=True)
    ]


def constrained(value: Any, sharding: Sharding) -> Any:
    """Gives an array of a step this sharding and memory kind. Returns other values unchanged."""
    if not isinstance(value, jax.Array):
        return value  # for example None, for a weight without a gradient
    put = jax.device_put if sharding.memory_kind == HOST else jax.lax.with_sharding_constraint
    return put(value, sharding)


@contextmanager
def read_in_order(
    optimizer: keras.Optimizer, values: Sequence[Any], shardings: Sequence[NamedSharding]
) -> Iterator[list[Any]]:
    """Yields the values for an optimizer's code; copies each to the devices when the code reads it.

    If the code of the optimizer has branches, all values are copied to the devices at once, because
    all branches must return arrays in the same memory. `values` may also contain Keras variables,
    because a LossScaleOptimizer passes the variables of its inner optimizer.
    """
    values = [_current(one) if isinstance(one, keras.Variable) else one for one in values]
    has_branches = optimizer.gradient_accumulation_steps or not keras_compat.is_builtin(
        type(optimizer)
    )
    if has_branches or isinstance(optimizer, keras_compat.LossScaleOptimizer):
        yield to_device(values, shardings)
        return
    pairs = zip(values, shardings, strict=True)
    on_host = {id(value): how for value, how in pairs if how.memory_kind == HOST}
    token = _copies.set(_Copies(optimizer.iterations, on_host) if on_host else None)
    try:
        yield list(values)
    finally:
        _copies.reset(token)


def brought(variable: keras.Variable, value: Any) -> Any:
    """Returns the value that the optimizer's code reads from a variable, copied to the devices."""
    copies = _copies.get()
    return value if copies is None else copies.of(variable, value)


@final
class _Copies:
    """The optimizer variables that one update has copied to the devices, group by group.

    The copies of a group wait until a weight of an earlier group has been updated.
    """

    def __init__(self, iterations: Any, on_host: dict[int, NamedSharding]) -> None:
        self._iterations = iterations
        self._on_host = on_host
        self._made: dict[int, Any] = {}
        self._weight: Any = None  # the last weight whose optimizer variables were copied
        self._bytes = 0  # how many bytes were copied for the current group
        # `_before` is an updated weight of the previous group. `_awaited` is an updated weight of
        # the group before the previous one; the copies of the current group wait for `_awaited`.
        self._before: Any = None
        self._awaited: Any = None

    def of(self, variable: keras.Variable, value: Any) -> Any:
        """Copies a value in host memory to the devices. Returns other values unchanged."""
        how = self._on_host.get(id(value))
        if how is None:
            return value
        if id(value) not in self._made:
            self._begin_group(weight_of(variable))
            self._bytes += keras_compat.nbytes(variable, how.shard_shape(value.shape))
            late = self._after_awaited(value, how)
            self._made[id(value)] = jax.device_put(late, in_device_memory(how))
        return self._made[id(value)]

    def _begin_group(self, weight: Any) -> None:
        if weight is not self._weight and self._bytes >= GROUP_BYTES:
            self._awaited, self._before = self._before, _current(self._weight)
            self._bytes = 0
        self._weight = weight

    def _after_awaited(self, value: jax.Array, how: NamedSharding) -> jax.Array:
        spec = [*how.spec, *[None] * (value.ndim - len(how.spec))]
        whole = [axis for axis in range(value.ndim) if spec[axis] is None and value.shape[axis] > 1]
        if self._awaited is None or not whole:
            return value
        axis = whole[0]
        first, size = self._awaited[(0,) * self._awaited.ndim], value.shape[axis]
        steps = _current(self._iterations).astype("int32")  # never negative, so `begin` is 0
        begin = jnp.minimum(steps + (first != 0).astype("int32"), 0)
        cut, half = jax.lax.dynamic_slice_in_dim, size // 2
        parts = [cut(value, begin, half, axis), cut(value, begin + half, size - half, axis)]
        return jnp.concatenate(
            [jax.device_put(one, in_device_memory(how)) for one in parts], axis=axis
        )


def _current(variable: keras.Variable) -> Any:
    scope = keras_compat.get_stateless_scope()
    assert scope is not None  # A step updates variables in a StatelessScope.
    return scope.get_current_value(variable)
