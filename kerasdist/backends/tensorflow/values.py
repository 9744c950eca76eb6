"""The framework's own distributed values, which pass for kerasdist's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from kerasdist import values
from kerasdist.backends.tensorflow.engine_seam import mirrored
from kerasdist.backends.tensorflow.variables import native
from kerasdist.structures import map_leaves, transpose


def register() -> None:
    """Lets ``isinstance`` take the framework's values for kerasdist's."""
    values.DistributedValues.register(tf.distribute.DistributedValues)
    values.PerReplica.register(tf.types.experimental.distributed.PerReplica)
    values.Mirrored.register(tf.types.experimental.distributed.Mirrored)


def wrapped(engine: tf.distribute.Strategy, parts: Sequence[Any]) -> Any:
    """Returns one value of the framework's with these components.

    Args:
        engine: The strategy whose replicas they are for.
        parts: One component for each replica of this process; no structures.
    """
    # The framework asks for one component after another, by numbers of all workers' replicas.
    remaining = iter(parts)
    return engine.experimental_distribute_values_from_function(lambda _: next(remaining))


def mirrored_on(engine: tf.distribute.Strategy, tensor: Any) -> Any:
    """Returns one value of the framework's with a copy of a tensor on each device.

    Args:
        engine: The strategy whose devices they are.
        tensor: A tensor, or ``tf.IndexedSlices``.
    """
    copies = []
    for device in engine.extended.worker_devices:
        with tf.device(device):
            copies.append(tf.nest.map_structure(tf.identity, tensor, expand_composites=True))
    return mirrored(copies)


def regrouped(engine: tf.distribute.Strategy, structures: Sequence[Any]) -> Any:
    """Returns a structure of distributed values, of one structure a replica.

    A leaf that is the same object in all replicas stays itself.

    Args:
        engine: The strategy of the replicas.
        structures: One a replica.

    Raises:
        ValueError: If they are not alike.
    """

    def merged(parts: Sequence[Any]) -> Any:
        first = parts[0]
        return first if all(part is first for part in parts) else wrapped(engine, parts)

    return transpose(structures, merged)


def to_native(engine: tf.distribute.Strategy, structure: Any) -> Any:
    """Returns a structure in which kerasdist's own values are made the framework's.

    Args:
        engine: The strategy they are for.
        structure: Nested tuples, lists and dicts.

    Raises:
        ValueError: If a value is for another number of replicas.
    """
    replicas = len(engine.extended.worker_devices)

    def converted(leaf: Any) -> Any:
        if not isinstance(leaf, values.DistributedValues):
            return leaf
        if len(leaf.values) != replicas:
            raise ValueError(
                f"Expected distributed values of the {replicas} replicas here. Received: a "
                f"value of {len(leaf.values)}: {leaf!r:.300}. Make it with this strategy."
            )
        if isinstance(leaf, tf.distribute.DistributedValues):
            return leaf
        if isinstance(leaf, values.Mirrored):
            return mirrored_on(engine, leaf.values[0])
        return wrapped(engine, [tensor_of_array(part) for part in leaf.values])

    return map_leaves(converted, structure)


def components(engine: tf.distribute.Strategy, value: Any) -> tuple[Any, ...]:
    """Returns one component a replica, of a tensor itself for each.

    Args:
        engine: The strategy of the replicas.
        value: A distributed value, a variable, or a tensor.
    """
    value = to_native(engine, native(value))
    if isinstance(value, tf.distribute.DistributedValues):
        return tuple(value.values)
    return (value,) * len(engine.extended.worker_devices)


def tensor_of_array(leaf: Any) -> Any:
    """Returns a tensor of a NumPy array; anything else is returned as it is.

    Args:
        leaf: Anything.
    """
    is_array = isinstance(leaf, np.ndarray | np.generic)
    return tf.convert_to_tensor(np.asarray(leaf)) if is_array else leaf
