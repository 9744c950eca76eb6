"""Makes and converts distributed values. On TensorFlow they are those of ``tf.distribute``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from kerasdist.api import values
from kerasdist.backends.base.checks import check_shapes
from kerasdist.backends.tensorflow.private.strategies import mirrored
from kerasdist.core.structures import map_leaves
from kerasdist.errors import ReplicaError


def register() -> None:
    """Registers ``tf.distribute``'s value classes as virtual subclasses of kerasdist's classes."""
    values.DistributedValues.register(tf.distribute.DistributedValues)
    values.PerReplica.register(tf.types.experimental.distributed.PerReplica)
    values.Mirrored.register(tf.types.experimental.distributed.Mirrored)


def mirrored_on(native_strategy: tf.distribute.Strategy, tensor: object) -> Any:
    """Returns a ``tf.distribute`` value with a copy of a tensor on each device."""
    copies = []
    for device in native_strategy.extended.worker_devices:
        with tf.device(device):
            copies.append(tf.nest.map_structure(tf.identity, tensor, expand_composites=True))
    return mirrored(copies)


def per_replica(native_strategy: tf.distribute.Strategy, parts: Iterable[Any]) -> Any:
    """Returns a ``tf.distribute`` value of the given components, one per replica of the process."""
    remaining = iter(parts)
    return native_strategy.experimental_distribute_values_from_function(lambda _: next(remaining))


def regrouped(native_strategy: tf.distribute.Strategy, structures: Sequence[Any]) -> Any:
    """Merges one structure per replica into one structure of ``tf.distribute`` values.

    A leaf that is the same object in all replicas stays as it is.
    """
    return values.per_replica(structures, partial(per_replica, native_strategy))


def to_native(native_strategy: tf.distribute.Strategy, structure: object) -> Any:
    """Converts kerasdist's distributed values in a structure to ``tf.distribute``'s values."""
    replicas = len(native_strategy.extended.worker_devices)

    def converted(leaf: object) -> Any:
        if not isinstance(leaf, values.DistributedValues):
            return leaf
        values.require_one_each(leaf, len(leaf.values), replicas)
        if isinstance(leaf, tf.distribute.DistributedValues):
            return leaf
        if isinstance(leaf, values.Mirrored):
            return mirrored_on(native_strategy, leaf.values[0])
        return per_replica(native_strategy, map(tensor_of_array, leaf.values))

    return map_leaves(converted, structure)


def tensor_of_array(leaf: object) -> Any:
    """Converts a NumPy array to a tensor; returns anything else unchanged."""
    is_array = isinstance(leaf, np.ndarray | np.generic)
    return tf.convert_to_tensor(np.asarray(leaf)) if is_array else leaf


def check_alike(parts: Sequence[Any], axis: int | None = None) -> None:
    """Refuses tensors of replicas if their types differ, or their known shapes do not fit."""
    if len({part.dtype for part in parts}) > 1:
        raise ReplicaError(
            "Expected tensors of one type from all replicas. Received: "
            f"dtypes={[part.dtype.name for part in parts]}. Cast them first."
        )
    check_shapes([shape_of(part) for part in parts], axis)


def concat(parts: Sequence[Any], axis: int) -> Any:
    """Concatenates tensors along an axis; sparse tensors are supported too."""
    if isinstance(parts[0], tf.SparseTensor):
        return tf.sparse.concat(axis, parts)
    return tf.concat(parts, axis)


def shape_of(part: Any) -> list[int | None] | None:
    """Returns a tensor's static shape; None if its rank is unknown."""
    return part.shape.as_list() if part.shape.rank is not None else None


def among_zeros(part: Any, axis: int, begin: Any, total: Any) -> Any:
    """Returns a tensor of size `total` along an axis: `part` at offset `begin`, zeros elsewhere.

    The sum of such tensors with consecutive offsets is the concatenation of their parts.
    """
    around = [[0, 0]] * part.shape.rank
    around[axis] = [begin, total - begin - (part.shape[axis] or tf.shape(part)[axis])]
    return tf.pad(part, around)
