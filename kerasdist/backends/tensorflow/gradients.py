"""Weighing gradients and adding them up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from kerasdist.backends.tensorflow.variables import native


def weighted(gradient: Any, weight: Any) -> Any:
    """Returns a gradient times a replica's weight: zero where the weight is 0, even if it is NaN.

    `training.numerics.weighted` in one operation, sparse gradients included.

    Args:
        gradient: A tensor, ``tf.IndexedSlices``, or None.
        weight: The replica's weight, a float or a scalar tensor.
    """
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        values = weighted(gradient.values, weight)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    if isinstance(weight, float):
        return gradient * weight
    return tf.math.multiply_no_nan(gradient, tf.cast(weight, gradient.dtype))


def summed(parts: Sequence[Any]) -> Any:
    """Returns the sum of the replicas' gradients of one variable, None where there is none.

    Args:
        parts: Tensors, ``tf.IndexedSlices``, or None.
    """
    parts = [part for part in parts if part is not None]
    if not parts:
        return None
    if all(isinstance(part, tf.IndexedSlices) for part in parts):
        # The rows one after another, as one device has them for the whole batch.
        return tf.IndexedSlices(
            tf.concat([part.values for part in parts], 0),
            tf.concat([part.indices for part in parts], 0),
            parts[0].dense_shape,
        )
    return tf.add_n([tf.convert_to_tensor(part) for part in parts])


def largest(parts: Sequence[Any]) -> Any:
    """Returns the elementwise maximum of the replicas' gradients of one variable.

    Args:
        parts: Tensors, or None.
    """
    parts = [part for part in parts if part is not None]
    return tf.reduce_max(tf.stack(parts), 0) if parts else None


def all_reduced(
    engine: tf.distribute.Strategy, gradients: Sequence[Sequence[Any]], variables: Sequence[Any]
) -> list[Any]:
    """Sums gradients by the engine's collectives, NCCL where it can be had.

    Args:
        engine: The strategy, in cross-replica context.
        gradients: For each variable the replicas' gradients.
        variables: The Keras variables they belong to.

    Returns:
        One gradient a variable: a value with a copy on every device, or None.
    """
    present = [index for index, parts in enumerate(gradients) if parts[0] is not None]
    reduced = engine.extended.batch_reduce_to(
        tf.distribute.ReduceOp.SUM,
        [(_per_replica(engine, gradients[index]), native(variables[index])) for index in present],
    )
    sums: list[Any] = [None] * len(gradients)
    for index, value in zip(present, reduced, strict=True):
        sums[index] = value
    return sums


def _per_replica(engine: tf.distribute.Strategy, parts: Sequence[Any]) -> Any:
    return engine.experimental_distribute_values_from_function(
        lambda replica: parts[replica.replica_id_in_sync_group]
    )
