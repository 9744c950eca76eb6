"""Helpers for arrays of NumPy and JAX, and for programs: type tests, padding, stacking, text."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.core
import numpy as np
from jax import numpy as jnp
from jax.sharding import Sharding

# When programs are compared, constants with more elements than this are compared by a checksum.
_LARGE_CONSTANT = 64


def cut(array: Any, shape: Sequence[int]) -> Any:
    """Returns an array without its padding: its first elements, in the given shape."""
    return array[tuple(slice(size) for size in shape)]


def largest_of(shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Returns the smallest shape in which arrays of all these shapes fit."""
    return tuple(map(max, zip(*shapes, strict=True)))


def padded(array: Any, shape: Sequence[int]) -> Any:
    """Pads an array of NumPy or JAX with zeros at the end of each axis, in the same library."""
    missing = [(0, size - own) for size, own in zip(shape, array.shape, strict=True)]
    return (jnp if isinstance(array, jax.Array) else np).pad(array, missing)


def is_traced(leaf: object) -> bool:
    """Returns whether a value is a tracer of JAX."""
    return isinstance(leaf, jax.core.Tracer)


def is_placed(leaf: object, sharding: Sharding) -> bool:
    """Returns whether a leaf is a JAX array with this sharding."""
    # Usually it is the same object: the test saves a slow comparison of meshes.
    return isinstance(leaf, jax.Array) and (leaf.sharding is sharding or leaf.sharding == sharding)


def here(leaf: object) -> Any:
    """Returns this process's copy of a global array that is whole everywhere; others unchanged."""
    if not isinstance(leaf, jax.Array) or is_traced(leaf) or leaf.is_fully_addressable:
        return leaf
    return leaf.addressable_data(0) if leaf.is_fully_replicated else leaf


def is_sharded(array: jax.Array) -> bool:
    """Returns whether each worker holds a shard of an array."""
    return not array.is_fully_addressable and not array.is_fully_replicated


def copied(array: jax.Array) -> jax.Array:
    """Returns a copy, which no other worker needs to help with."""
    if array.is_fully_addressable:
        return jnp.copy(array)
    shards = [jnp.copy(shard.data) for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)


def is_array(leaf: object) -> bool:
    """Returns whether a leaf is an array of JAX or NumPy, or a NumPy scalar."""
    return isinstance(leaf, jax.Array | np.ndarray | np.generic)


def stack(parts: Sequence[Any]) -> Any:
    """Stacks arrays: with JAX if they are traced or share a device, else on the host."""
    if not any(isinstance(part, jax.Array) for part in parts):
        return np.stack([np.asarray(part) for part in parts])
    if any(is_traced(part) for part in parts):
        return jnp.stack(parts)
    devices = {part.sharding for part in parts if isinstance(part, jax.Array)}
    if len(devices) == 1:
        return jnp.stack(parts)
    # The arrays are on different devices, which `jnp.stack` refuses.
    return np.stack([np.asarray(part) for part in parts])


def text_of(lowered: Any) -> str:
    """Returns a program as text, without source locations, with a checksum of large constants."""
    module = lowered.compiler_ir("stablehlo").operation
    text = module.get_asm(enable_debug_info=False, large_elements_limit=_LARGE_CONSTANT)
    if "__elided__" not in text:
        return text
    whole = module.get_asm(enable_debug_info=False).splitlines()
    constants = "\n".join(line for line in whole if "stablehlo.constant" in line)
    return f"{text}\n// constants: {zlib.crc32(constants.encode()):08x}"
