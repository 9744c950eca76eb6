"""Weighing gradients and adding them up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from kerasdist.backends.checks import check_summable
from kerasdist.backends.tensorflow.engine_seam import mirrored
from kerasdist.collectives import CommunicationImplementation, CommunicationOptions


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


def counted(value: Any, weight: Any) -> Any:
    """Returns what a replica gives to a sum: zero, even for NaN, from one without example.

    Args:
        value: A tensor, or ``tf.IndexedSlices``.
        weight: The replica's weight, a float or a scalar tensor.
    """
    if isinstance(weight, float):
        return value
    if isinstance(value, tf.IndexedSlices):
        values = counted(value.values, weight)
        return tf.IndexedSlices(values, value.indices, value.dense_shape)
    value = tf.convert_to_tensor(value)
    return tf.where(weight > 0, value, tf.zeros_like(value))


def summed(parts: Sequence[Any]) -> Any:
    """Returns the sum of the replicas' gradients of one variable, None where there is none.

    Args:
        parts: Tensors, ``tf.IndexedSlices``, or None.
    """
    parts = [part for part in parts if part is not None]
    if not parts:
        return None
    check_summable(parts[0].dtype.name)
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


def divided(total: Any, count: Any) -> Any:
    """Returns a sum divided by a number; of integers a float64.

    Args:
        total: A tensor, ``tf.IndexedSlices``, or a distributed value of the framework's.
        count: The number.
    """
    if isinstance(total, tf.distribute.DistributedValues):
        return mirrored([divided(part, count) for part in total.values])
    if isinstance(total, tf.IndexedSlices):
        values = divided(total.values, count)
        return tf.IndexedSlices(values, total.indices, total.dense_shape)
    return total / tf.cast(count, total.dtype)


def native_options(options: CommunicationOptions) -> Any:
    """Returns the framework's options that say the same.

    Args:
        options: How to communicate.
    """
    implementation = CommunicationImplementation(options.implementation)
    return tf.distribute.experimental.CommunicationOptions(
        bytes_per_pack=options.bytes_per_pack,
        timeout_seconds=options.timeout_seconds,
        implementation=tf.distribute.experimental.CommunicationImplementation[implementation.name],
    )
