"""How the components of distributed values are kept together on JAX."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, final, overload

import jax
import jax.core
import numpy as np
from jax import numpy as jnp

from kerasdist.backends.checks import check_shapes
from kerasdist.backends.jax.arrays import cut, is_array, is_traced, largest_of, padded, stack
from kerasdist.backends.jax.layout import AXIS
from kerasdist.backends.jax.parcels import Slot
from kerasdist.errors import UnsupportedError
from kerasdist.values import DistributedValues, Mirrored, PerReplica


class Source(Sequence[Any]):
    """The components of a value, kept as one array; a component is fetched when it is asked for.

    On a mesh of several workers the array has the components of all replicas. Those of this worker
    are the elements of the sequence; in the code of a program, which all workers run, all are.

    Attributes:
        layout: The number of components; where they differ in shape, their shapes.
        packed: The parcel that the array lies in, and where; None if it lies alone.
    """

    def __init__(
        self,
        array: Any,
        layout: Any,
        sharding: Any = None,
        packed: tuple[np.ndarray, Slot] | None = None,
    ) -> None:
        """Makes the source.

        Args:
            array: The array, None if it is packed.
            layout: The number of components; where they differ in shape, their shapes.
            sharding: Where an array that waits on the host goes in the end.
            packed: The parcel that the array lies in, and where; None if it lies alone.
        """
        self._array = array
        self._sharding = sharding
        self.layout = layout
        self.packed = packed

    @property
    def array(self) -> Any:
        """The array, on the devices."""
        if self._sharding is not None:
            with jax.ensure_compile_time_eval():  # it outlives the program that asks for it
                self.put(jax.device_put(self.entering, self._sharding))
        return self._array

    @property
    def entering(self) -> Any:
        """The array as a program takes it: on the host, if it waits there."""
        if self._array is None and self.packed is not None:
            parcel, slot = self.packed
            self._array = slot.cut(parcel)
        return self._array

    def put(self, array: Any) -> None:
        """Replaces the array by its copy on the devices.

        Args:
            array: The copy.
        """
        self._array, self._sharding, self.packed = array, None, None

    def wait_on_host(self, sharding: Any) -> None:
        """Leaves an array of NumPy's where it is until something but a program asks for it.

        Args:
            sharding: Where it goes then.
        """
        dtype = jax.dtypes.canonicalize_dtype(self._array.dtype)
        self._array, self._sharding = self._array.astype(dtype, copy=False), sharding

    @property
    def replicas(self) -> int:
        """How many components there are, on all workers."""
        return self.layout

    @property
    def numbers(self) -> Sequence[int]:
        """Which of them are here."""
        array = self._array
        if is_traced(array) or not isinstance(array, jax.Array) or array.is_fully_addressable:
            return range(self.replicas)
        return self._numbers_here(array.addressable_shards)

    @abc.abstractmethod
    def _numbers_here(self, shards: Sequence[Any]) -> Sequence[int]:
        """Returns which components some shards of the array hold."""

    def __len__(self) -> int:
        return len(self.numbers)

    @overload
    def __getitem__(self, index: int) -> Any: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Any]: ...

    def __getitem__(self, index: int | slice) -> Any:
        return self._components[index]

    @cached_property
    def _components(self) -> tuple[Any, ...]:
        if is_traced(self.array):
            return tuple(self._fetched())
        with jax.ensure_compile_time_eval():  # they outlive the program that asks for them
            return tuple(self._fetched())

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, ...]:
        """The shape of a component."""

    @abc.abstractmethod
    def stacked(self) -> Any:
        """Returns the components along a new first axis."""

    @abc.abstractmethod
    def _fetched(self) -> Sequence[Any]:
        """Returns the components."""


@final
class Stacked(Source):
    """Components along the first axis of a global array, one a device."""

    @classmethod
    def in_parcel(cls, parcel: np.ndarray, slot: Slot, sharding: Any) -> Stacked:
        """Returns components that wait on the host (see `kerasdist.backends.jax.parcels`).

        Args:
            parcel: What they lie in.
            slot: Where they lie.
            sharding: Where they go if something but a program asks for them.
        """
        return cls(None, slot.shape[0], sharding, (parcel, slot))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a component."""
        return tuple(self.array.shape[1:])

    def stacked(self) -> Any:
        """Returns the array."""
        return self.array

    def _numbers_here(self, shards: Sequence[Any]) -> Sequence[int]:
        return sorted(map(_first_row, shards))

    def _fetched(self) -> Sequence[Any]:
        if is_traced(self.array):
            return [self.array[index] for index in range(self.replicas)]
        shards = sorted(self.array.addressable_shards, key=_first_row)
        return [_without_axis(shard.data) for shard in shards]


@final
class Padded(Source):
    """Components of different shapes, padded to one, along the first axis of a global array."""

    @property
    def replicas(self) -> int:
        """How many components there are, on all workers."""
        return len(self.layout)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of all components together, as far as they share it."""
        return tuple(self.array.shape[1:])

    def stacked(self) -> Any:
        """Refuses components of different shapes."""
        check_shapes(self.layout)
        return self.array

    def _numbers_here(self, shards: Sequence[Any]) -> Sequence[int]:
        return sorted(map(_first_row, shards))

    def _fetched(self) -> Sequence[Any]:
        parts = Stacked(self.array, self.replicas)
        shapes = [self.layout[number] for number in self.numbers]
        return [cut(part, shape) for part, shape in zip(parts, shapes, strict=True)]


@final
class Equal(Source):
    """Components that are equal: one global array, whole on each device."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a component."""
        return tuple(self.array.shape)

    def stacked(self) -> Any:
        """Returns the array as often as there are components."""
        return jnp.broadcast_to(self.array, (self.replicas, *self.shape))

    def _numbers_here(self, shards: Sequence[Any]) -> Sequence[int]:
        return range(len(shards))

    def _fetched(self) -> Sequence[Any]:
        if is_traced(self.array):
            return [self.array] * self.replicas
        shards = [shard.data for shard in self.array.addressable_shards]
        return shards if len(shards) == len(self) else [self.array] * len(self)


@final
class Own(Source):
    """In the code of one replica: its component, from which the others are an all-gather away."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a component."""
        return tuple(self.array.shape)

    def stacked(self) -> Any:
        """Gathers the components of all replicas."""
        return jax.lax.all_gather(self.array, AXIS)

    def _numbers_here(self, shards: Sequence[Any]) -> Sequence[int]:
        raise AssertionError("a replica's own component is always traced")

    def _fetched(self) -> Sequence[Any]:
        everyone = self.stacked()
        return [everyone[index] for index in range(self.replicas)]


def _first_row(shard: Any) -> int:
    return shard.index[0].start or 0


_SOURCES = frozenset((Stacked, Padded, Equal, Own))

_without_axis = jax.jit(lambda shard: shard[0])


def is_distributed(leaf: Any) -> bool:
    """Returns whether a leaf is a distributed value.

    Args:
        leaf: Anything.
    """
    return type(leaf) in KINDS  # much faster than to ask an abstract class


def flatten(structure: Any) -> tuple[list[Any], Any]:
    """Returns leaves and structure of a pytree; a distributed value is a leaf, None is none.

    Args:
        structure: A pytree.
    """
    return jax.tree.flatten(structure, is_leaf=is_distributed)


def itself(array: Any) -> Any:
    """Returns an array.

    Args:
        array: The array.
    """
    return array


def rebuilt(value: Callable[[Any], Any], kind: Callable[..., Any], layout: Any, array: Any) -> Any:
    """Returns a distributed value.

    Args:
        value: Its class.
        kind: The class of its source.
        layout: The source's layout.
        array: The source's array.
    """
    return value(kind(array, layout))


def own(structure: Any) -> Any:
    """Returns what a replica gets of a structure of values that its own code made.

    Args:
        structure: A pytree.
    """

    def component(leaf: Any) -> Any:
        if not is_distributed(leaf):
            return leaf
        if isinstance(leaf.source, Own | Equal):
            return leaf.source.array
        source = joined(leaf)
        if source is None:
            raise unlike(leaf)
        return source.stacked()[jax.lax.axis_index(AXIS)]

    return jax.tree.map(component, structure, is_leaf=is_distributed)


def joined(value: DistributedValues, replicas: int | None = None) -> Source | None:
    """Returns the components of a value in one array; None if their types or ranks differ.

    Args:
        value: The value.
        replicas: How many components there must be, on all workers; None: as many as there are.

    Raises:
        ValueError: If it has another number of components.
    """
    source: Any = value.source
    if replicas is None and type(source) in _SOURCES:  # much faster than to ask an abstract class
        return source
    count = source.replicas if isinstance(source, Source) else len(source)
    if replicas is not None and count != replicas:
        raise ValueError(
            f"Expected a distributed value of {replicas} components, one a replica. Received: "
            f"{type(value).__name__} of {count}. Make it with the strategy that it is used with."
        )
    if isinstance(source, Source):
        return source
    parts = list(source)
    if _are_alike_on_host(parts):  # as most batches are; what follows asks JAX, for much more
        return Stacked(np.stack(parts), count)
    if not all(is_array(part) or isinstance(part, bool | int | float) for part in parts):
        return None
    if len({(np.ndim(part), jnp.result_type(part)) for part in parts}) > 1:
        return None
    shapes = tuple(np.shape(part) for part in parts)
    if len(set(shapes)) == 1:
        return Stacked(stack(parts), count)
    largest = largest_of(shapes)
    return Padded(stack([padded(part, largest) for part in parts]), shapes)


def _are_alike_on_host(parts: Sequence[Any]) -> bool:
    first = parts[0]
    return isinstance(first, np.ndarray) and all(
        isinstance(part, np.ndarray) and part.shape == first.shape and part.dtype == first.dtype
        for part in parts
    )


def unlike(value: DistributedValues) -> UnsupportedError:
    """Returns the error for components that do not go together.

    Args:
        value: The distributed value.
    """
    kinds = [
        f"{part.dtype}{list(part.shape)}" if is_array(part) else repr(part)[:50]
        for part in value.values
    ]
    return UnsupportedError(
        "Expected arrays of one type and one number of axes as the components of a distributed "
        f"value: on JAX the replicas run one program. Received: components={kinds}. Make them "
        "alike, or compute the value from the replica's number in the function."
    )


def _register(kind: type[DistributedValues]) -> None:
    """Makes a kind of value a pytree, whose children are arrays that `jax.jit` takes."""

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


# The classes of distributed values.
KINDS = frozenset((PerReplica, Mirrored))

for _kind in KINDS:
    _register(_kind)
