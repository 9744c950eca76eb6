"""Arrays, NumPy's and JAX's alike: what they are, and how to fit them to a shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.core
import numpy as np
from jax import numpy as jnp


def cut(array: Any, shape: Sequence[int]) -> Any:
    """Returns the part of an array that was not padded.

    Args:
        array: The array.
        shape: The shape of that part.
    """
    return array[tuple(slice(size) for size in shape)]


def largest_of(shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Returns the shape that arrays of some shapes fit in.

    Args:
        shapes: Shapes of one number of axes.
    """
    return tuple(map(max, zip(*shapes, strict=True)))


def padded(array: Any, shape: Sequence[int]) -> Any:
    """Returns an array with zeros behind it, NumPy's or JAX's as it is.

    Args:
        array: The array.
        shape: The shape of the result.
    """
    missing = [(0, size - own) for size, own in zip(shape, array.shape, strict=True)]
    return (jnp if isinstance(array, jax.Array) else np).pad(array, missing)


def is_traced(leaf: Any) -> bool:
    """Returns whether JAX is tracing the function that a value belongs to.

    Args:
        leaf: Anything.
    """
    return isinstance(leaf, jax.core.Tracer)


def is_array(leaf: Any) -> bool:
    """Returns whether JAX takes a leaf as an array of known type.

    Args:
        leaf: Anything.
    """
    return isinstance(leaf, jax.Array | np.ndarray | np.generic)


def stack(parts: Sequence[Any]) -> Any:
    """Stacks arrays on the host, unless a device has them already.

    Args:
        parts: Arrays of one shape.
    """
    if not any(isinstance(part, jax.Array) for part in parts):
        return np.stack([np.asarray(part) for part in parts])
    if any(is_traced(part) for part in parts):
        return jnp.stack(parts)
    devices = {part.sharding for part in parts if isinstance(part, jax.Array)}
    if len(devices) == 1:
        return jnp.stack(parts)
    # One a device: they become one array where they are, and that without a copy.
    return np.stack([np.asarray(part) for part in parts])
