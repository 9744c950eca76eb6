"""Helpers for arrays of NumPy and JAX: type tests, padding, stacking."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import accumulate, groupby
from typing import Any, TypeVar

import jax
import numpy as np
from jax import numpy as jnp
from jax.sharding import Sharding, SingleDeviceSharding

HOST = "pinned_host"
"""JAX's name for page-locked host memory, which devices can read and write directly."""


_Item = TypeVar("_Item")


def cut(array: Any, shape: Sequence[int]) -> Any:
    """Removes padding: returns the first elements along each axis, as many as `shape` says."""
    return array[tuple(slice(size) for size in shape)]


def largest_of(shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Returns the smallest shape in which arrays of all these shapes fit."""
    return tuple(map(max, zip(*shapes, strict=True)))


def padded(array: Any, shape: Sequence[int]) -> Any:
    """Pads an array with zeros at the end of each axis; JAX arrays stay on their devices."""
    if np.shape(array) == tuple(shape):
        return array
    missing = [(0, size - own) for size, own in zip(shape, np.shape(array), strict=True)]
    return (jnp if isinstance(array, jax.Array) else np).pad(array, missing)


def is_traced(leaf: object) -> bool:
    """Returns whether a value is a tracer of JAX, whose device is not known."""
    # The class is compared, because a tracer that is asked for its device raises an error. That
    # takes long, because JAX searches the whole trace for the error's message.
    return isinstance(leaf, jax.Array) and not isinstance(leaf, _class_of_arrays())


@cache
def _class_of_arrays() -> type:
    with jax.ensure_compile_time_eval():  # this works even if the calling code is traced
        return type(jnp.zeros(()))


def is_placed(leaf: object, sharding: Sharding) -> bool:
    """Returns whether a leaf is a JAX array with this sharding."""
    # `is` comes first: usually both shardings are the same object, and `==` compares meshes slowly.
    return isinstance(leaf, jax.Array) and (leaf.sharding is sharding or leaf.sharding == sharding)


def in_device_memory(sharding: Sharding) -> Sharding:
    """Returns the sharding, with the devices' memory in place of the host's memory."""
    return sharding.with_memory_kind("device") if sharding.memory_kind == HOST else sharding


def on_device(leaf: object) -> Any:
    """Copies an array from the host's memory to its devices. Returns other values unchanged."""
    if not isinstance(leaf, jax.Array) or is_traced(leaf) or leaf.sharding.memory_kind != HOST:
        return leaf
    return jax.device_put(leaf, in_device_memory(leaf.sharding))


def local_copy(leaf: object) -> Any:
    """Returns this process's copy of a replicated global array, and any other value unchanged."""
    if not isinstance(leaf, jax.Array) or is_traced(leaf) or leaf.is_fully_addressable:
        return leaf
    return leaf.addressable_data(0) if leaf.is_fully_replicated else leaf


def parts_of(array: np.ndarray[Any, Any], dtype: str, sharding: Sharding) -> jax.Array:
    """Makes a global array from a NumPy array, cast to a type; each device gets only its shard."""
    places = sharding.addressable_devices_indices_map(array.shape)
    parts = [
        jax.device_put(
            array[index].astype(dtype, copy=False),
            SingleDeviceSharding(device, memory_kind=sharding.memory_kind),
            may_alias=False,
        )
        for device, index in places.items()
    ]
    made = jax.make_array_from_single_device_arrays(array.shape, sharding, parts)
    jax.block_until_ready(made)  # because the caller may change the NumPy array afterwards
    gc.collect(0)  # otherwise JAX keeps the NumPy arrays until it makes another array
    return made


def in_bundles(items: Iterable[_Item], sizes: Iterable[int], most: int) -> Iterator[list[_Item]]:
    """Yields consecutive items, in lists of about `most` bytes; a single item may have more."""
    pairs = zip(accumulate(sizes), items, strict=True)
    for _, bundle in groupby(pairs, lambda pair: pair[0] // most):
        yield [item for _, item in bundle]


def is_sharded(array: jax.Array) -> bool:
    """Returns whether each worker holds only a shard of an array."""
    return not array.is_fully_addressable and not array.is_fully_replicated


def copied(array: jax.Array) -> jax.Array:
    """Returns a copy of an array; each worker copies its own shards, without communication."""
    copy = _copied_on_host if array.sharding.memory_kind == HOST else jnp.copy
    if array.is_fully_addressable:
        return copy(array)
    shards = [copy(shard.data) for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)


def _copied_on_host(array: jax.Array) -> jax.Array:
    return jax.device_put(np.array(array), array.sharding)


def is_array(leaf: object) -> bool:
    """Returns whether a leaf is an array of JAX or NumPy, or a NumPy scalar."""
    return isinstance(leaf, jax.Array | np.ndarray | np.generic)


def stack(parts: Sequence[Any]) -> Any:
    """Stacks arrays: with JAX if they are traced or on the same device, else on the host."""
    if any(map(is_traced, parts)):
        return jnp.stack(parts)
    # `jnp.stack` refuses arrays on different devices.
    shardings = {part.sharding for part in parts if isinstance(part, jax.Array)}
    return jnp.stack(parts) if len(shardings) == 1 else np.stack(list(map(np.asarray, parts)))
