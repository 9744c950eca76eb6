"""Checking and putting together the replicas' components of one value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from kerasdist.errors import ReplicaError


def check_alike(parts: Sequence[Any], axis: int | None = None) -> None:
    """Refuses tensors of the replicas that cannot be combined, as far as their shapes are known.

    Args:
        parts: One tensor a replica.
        axis: The axis along which they may differ in size, None for no such axis.

    Raises:
        ReplicaError: If they differ in type or shape.
    """
    if len({part.dtype for part in parts}) > 1:
        raise ReplicaError(
            "Expected tensors of one type from all replicas. Received: "
            f"dtypes={[part.dtype.name for part in parts]}. Cast them first."
        )
    if not fit(parts, axis):
        raise ReplicaError(
            f"Expected tensors of {_same_shape(axis)} from all replicas. Received: "
            f"shapes={[_shown(part) for part in parts]}. Pad or reduce them first."
        )


def fit(parts: Sequence[Any], axis: int | None = None) -> bool:
    """Returns whether tensors may have the same shape, but for the size along an axis.

    Args:
        parts: Tensors.
        axis: An axis from 0, or None.
    """
    shapes = [_without(part.shape, axis) for part in parts]
    return all(shape.is_compatible_with(shapes[0]) for shape in shapes)


def fitting(parts: Sequence[Any], axis: int | None = None) -> Sequence[Any]:
    """Returns the components of a value that fit together.

    Args:
        parts: Tensors.
        axis: The axis along which they may differ in size, None for no such axis.

    Raises:
        ValueError: If they do not.
    """
    if not fit(parts, axis):
        raise ValueError(
            f"Expected components of {_same_shape(axis)}. Received: "
            f"shapes={[_shown(part) for part in parts]}. Where batches are ragged, reduce along "
            "their axis too: axis=0."
        )
    return parts


def concat(parts: Sequence[Any], axis: int) -> Any:
    """Returns tensors one after another along an axis.

    Args:
        parts: Tensors, all dense, sparse or ragged.
        axis: The axis, from 0.
    """
    if isinstance(parts[0], tf.SparseTensor):
        return tf.sparse.concat(axis, parts)
    return tf.concat(parts, axis)


def _without(shape: tf.TensorShape, axis: int | None) -> tf.TensorShape:
    if axis is None or shape.rank is None:
        return shape
    sizes = shape.as_list()
    # A tensor without this axis fits to none that has it.
    return tf.TensorShape(sizes[:axis] + sizes[axis + 1 :] + [None] * (axis < len(sizes)))


def _same_shape(axis: int | None) -> str:
    return "the same shape" if axis is None else f"the same shape but for axis {axis}"


def _shown(part: Any) -> Any:
    return part.shape.as_list() if part.shape.rank is not None else None
