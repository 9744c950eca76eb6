"""Checking and putting together the replicas' components of one value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from kerasdist.backends.checks import check_shapes
from kerasdist.errors import ReplicaError


def check_alike(parts: Sequence[Any], axis: int | None = None) -> None:
    """Refuses tensors of the replicas that cannot be combined, as far as their shapes are known.

    Args:
        parts: One tensor a replica.
        axis: The axis along which they may differ in size, None for no such axis.

    Raises:
        ReplicaError: If they differ in type.
        ShapeError: If they differ in shape.
    """
    if len({part.dtype for part in parts}) > 1:
        raise ReplicaError(
            "Expected tensors of one type from all replicas. Received: "
            f"dtypes={[part.dtype.name for part in parts]}. Cast them first."
        )
    fitting(parts, axis)


def fitting(parts: Sequence[Any], axis: int | None = None) -> Sequence[Any]:
    """Returns the components of a value that fit together.

    Args:
        parts: Tensors.
        axis: The axis along which they may differ in size, None for no such axis.

    Raises:
        ShapeError: If they do not.
    """
    check_shapes([shape_of(part) for part in parts], axis)
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


def shape_of(part: Any) -> list[int | None] | None:
    """Returns a tensor's shape, as far as it is known; None where not even its rank is."""
    return part.shape.as_list() if part.shape.rank is not None else None
