"""Distributed values on JAX: how an array holds their components, and how they are reduced."""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, final

import jax
import numpy as np
from jax import numpy as jnp

from kerasdist.api.options import ReduceOp
from kerasdist.api.values import DistributedValues, Mirrored, PerReplica, require_one_each
from kerasdist.backends.base.checks import check_shapes, check_summable
from kerasdist.backends.jax.mesh.arrays import cut, is_array, is_traced, largest_of, padded, stack
from kerasdist.backends.jax.mesh.layout import AXIS
from kerasdist.errors import UnsupportedError


class Source(Sequence[Any]):
    """The components of a distributed value, in one array, from which code can read each component.

    With several workers the array holds the components of all replicas. This object is also a
    sequence. Outside of a program the sequence has only this worker's components. Inside of a
    program, which all workers run, the sequence has all components.

    Attributes:
        array: The array of the components.
        layout: The number of components, or their shapes if these differ.
    """

    def __init__(self, array: Any, layout: int | tuple[tuple[int, ...], ...]) -> None:
        self.array = array
        self.layout = layout

    @property
    def replicas(self) -> int:
        """How many components all workers have together."""
        return self.layout if isinstance(self.layout, int) else len(self.layout)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a component; if the shapes differ, the smallest shape in which all fit."""
        return tuple(self.array.shape)

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shape of each component."""
        return (self.shape,) * self.layout if isinstance(self.layout, int) else self.layout

    def __len__(self) -> int:
        return len(self._components)

    def __getitem__(self, index: Any) -> Any:
        return self._components[index]

    @cached_property
    def _components(self) -> tuple[Any, ...]:
        if is_traced(self.array):
            return tuple(self.elements())
        # Even if JAX is tracing a program now, the components must not be tracers, because they are
        # also used after the trace.
        with jax.ensure_compile_time_eval():
            return tuple(self._fetched() if isinstance(self.array, jax.Array) else self.elements())

    @abc.abstractmethod
    def stacked(self) -> Any:
        """Returns the components, stacked along a new first axis."""

    @abc.abstractmethod
    def elements(self) -> Sequence[Any]:
        """Returns the components of all replicas; this process must be able to read all of them."""

    def _fetched(self) -> Sequence[Any]:
        """Returns the components that are on this process's devices."""
        return self.elements()


@final
class Stacked(Source):
    """Components stacked along the first axis of a global array, one per replica."""

    @property
    def differ(self) -> bool:
        """Whether the shapes of components differ, so that components are padded to one shape."""
        return not isinstance(self.layout, int)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a component; if the shapes differ, the smallest shape in which all fit."""
        return tuple(self.array.shape[1:])

    def stacked(self) -> Any:
        """Returns the array; refuses components of different shapes."""
        check_shapes(self.shapes)
        return self.array

    def elements(self) -> Sequence[Any]:
        """Returns all components."""
        return [cut(self.array[index], shape) for index, shape in enumerate(self.shapes)]

    def _fetched(self) -> Sequence[Any]:
        return [cut(shard, self.shapes[index]) for index, shard in _shards_here(self.array)]


@final
class Equal(Source):
    """Components that are equal: one global array, of which each device has a copy."""

    def stacked(self) -> Any:
        """Returns the array, repeated along a new first axis, once per component."""
        return jnp.broadcast_to(self.array, (self.replicas, *self.shape))

    def elements(self) -> Sequence[Any]:
        """Returns all components."""
        return [self.array] * self.replicas

    def _fetched(self) -> Sequence[Any]:
        shards = [shard.data for shard in self.array.addressable_shards]
        if self.array.is_fully_addressable and len(shards) != self.replicas:
            return [self.array] * self.replicas
        return shards[:: self.array.sharding.num_devices // self.replicas]  # one per replica


@final
class Own(Source):
    """Components as the traced code of one replica sees them.

    The array is this replica's component. The components of other replicas must be gathered.
    """

    def stacked(self) -> Any:
        """Gathers the components of all replicas."""
        return jax.lax.all_gather(self.array, AXIS)

    def elements(self) -> Sequence[Any]:
        """Returns all components."""
        everyone = self.stacked()
        return [everyone[index] for index in range(self.replicas)]


def _shards_here(array: Any) -> list[tuple[int, Any]]:
    """Returns this process's elements of an array along axis 0, each with its index.

    All logical devices of a replica hold the same element, which is returned once.
    """
    shards = [shard for shard in array.addressable_shards if shard.replica_id == 0]
    numbered = [(shard.index[0].start or 0, _without_axis(shard.data)) for shard in shards]
    return sorted(numbered, key=lambda pair: pair[0])


_without_axis = jax.jit(lambda shard: shard[0])


def reduced(source: Source, op: ReduceOp, axes: tuple[int, ...] | None) -> Any:
    """Returns the sum or mean of a value's components; with `axes`, also along these axes."""
    check_summable(source.array.dtype.name)
    mean = op is ReduceOp.MEAN
    count = source.replicas
    if isinstance(source, Own):
        local = source.array if axes is None else source.array.sum(axes, dtype=source.array.dtype)
        total = jax.lax.psum(local, AXIS)
    elif isinstance(source, Equal):
        total = source.array if axes is None else source.array.sum(axes, dtype=source.array.dtype)
        count, total = (1, total) if mean else (count, total * count)
    elif isinstance(source, Stacked) and source.differ and axes is not None:
        # Each component is summed without its padding. If the sums then differ in shape, the
        # components differ along other axes, which `stacked` refuses.
        sums = [part.sum(axes, dtype=part.dtype) for part in source.elements()]
        if len({one.shape for one in sums}) > 1:
            source.stacked()
        total = sum(sums[1:], sums[0])
        return total / sum(_size(shape, axes) for shape in source.shapes) if mean else total
    else:
        every = source.stacked()
        total = every.sum(0, dtype=every.dtype)
        total = total if axes is None else total.sum(axes, dtype=every.dtype)
    if axes is not None:
        count *= _size(source.shape, axes)
    return total / count if mean else total


def _size(shape: tuple[int, ...], axes: tuple[int, ...]) -> int:
    return math.prod(shape[axis] for axis in axes)


def gathered(source: Source, axis: int) -> Any:
    """Returns the components, concatenated along an axis."""
    if isinstance(source, Own):
        return jax.lax.all_gather(source.array, AXIS, axis=axis, tiled=True)
    check_shapes(source.shapes, axis)
    return jnp.concatenate(list(source.elements()), axis)


def is_distributed(leaf: object) -> bool:
    """Returns whether a leaf is a distributed value."""
    return type(leaf) in (PerReplica, Mirrored)


def flatten(structure: object) -> tuple[list[Any], Any]:
    """Returns a pytree's leaves and structure. A distributed value is one leaf; None is no leaf."""
    return jax.tree.flatten(structure, is_leaf=is_distributed)


def map_values(function: Callable[[Any], Any], structure: object) -> Any:
    """Returns a pytree with ``function(leaf)`` for each leaf; a distributed value is one leaf."""
    return jax.tree.map(function, structure, is_leaf=is_distributed)


def in_one_array(leaf: Any) -> Any:
    """Returns a distributed value with its components in one array, if one array can hold them."""
    source = joined(leaf) if is_distributed(leaf) else None
    return leaf if source is None else type(leaf)(source)


def own(structure: Any) -> Any:
    """Replaces each distributed value in a structure by this replica's component."""

    def component(leaf: Any) -> Any:
        if not is_distributed(leaf):
            return leaf
        if isinstance(leaf.source, Own | Equal):
            return leaf.source.array
        return source_of(leaf).stacked()[jax.lax.axis_index(AXIS)]

    return map_values(component, structure)


def of_own(structure: Any, replicas: int) -> Any:
    """Replaces each array by a distributed value whose component on this replica is the array."""
    return map_values(
        lambda leaf: PerReplica(Own(leaf, replicas)) if is_array(leaf) else leaf, structure
    )


def joined(value: DistributedValues, replicas: int | None = None) -> Source | None:
    """Returns the components of a value in one array; None if their types or ranks differ."""
    source: Any = value.source
    if replicas is not None:
        count = source.replicas if isinstance(source, Source) else len(source)
        require_one_each(value, count, replicas)
    if isinstance(source, Source):
        return source
    parts = list(source)
    if not all(map(is_number, parts)):
        return None
    if len({(np.ndim(part), jnp.result_type(part)) for part in parts}) > 1:
        return None
    shapes = tuple(np.shape(part) for part in parts)
    return stacked(stack([padded(part, largest_of(shapes)) for part in parts]), shapes)


def stacked(array: Any, shapes: Sequence[tuple[int, ...]]) -> Stacked:
    """Returns components with these shapes from an array that has one component per row."""
    return Stacked(array, tuple(shapes) if len(set(shapes)) > 1 else len(shapes))


def is_number(part: object) -> bool:
    """Returns whether a component is an array or a Python number."""
    return is_array(part) or isinstance(part, bool | int | float)


def source_of(value: DistributedValues, replicas: int | None = None) -> Source:
    """Returns a value's components in one array; refuses components of different types or ranks."""
    source = joined(value, replicas)
    if source is not None:
        return source
    kinds = [
        f"{part.dtype}{list(part.shape)}" if is_array(part) else repr(part)[:50]
        for part in value.values
    ]
    raise UnsupportedError(
        "Expected arrays of one type and one number of axes as the components of a distributed "
        f"value: on JAX the replicas run one program. Received: components={kinds}. Make the "
        "components alike, or compute the value from the replica's number in the function."
    )


def _register(kind: type[DistributedValues]) -> None:
    """Registers a class of distributed values as pytrees, whose children are their arrays."""

    def children(value: DistributedValues) -> tuple[Sequence[Any], Any]:
        source = value.source
        if isinstance(source, Source):
            return (source.array,), (type(source), source.layout)
        return tuple(source), None

    def unflattened(kept: Any, arrays: Sequence[Any]) -> DistributedValues:
        make: Callable[..., Any] = kind
        if kept is None:
            return make(tuple(arrays))
        source_class, layout = kept
        return make(source_class(arrays[0], layout))

    jax.tree_util.register_pytree_node(kind, children, unflattened)


_register(PerReplica)
_register(Mirrored)
