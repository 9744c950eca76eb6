"""Weighting gradients and adding them up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from kerasdist.backends.base.checks import check_summable
from kerasdist.backends.tensorflow.private.strategies import mirrored


def on_values(function: Callable[[Any], Any], gradient: object) -> Any:
    """Applies a function to a gradient; to the values of the rows, if it is sparse."""
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        values = function(gradient.values)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return function(gradient)


def weighted(gradient: Any, weight: Any) -> Any:
    """Returns a gradient times a replica's weight: zero where the weight is 0, even if it is NaN.

    `training.numerics.weighted` in one operation, sparse gradients included.
    """
    if isinstance(weight, float):
        return on_values(lambda values: values * weight, gradient)
    return on_values(
        lambda values: tf.math.multiply_no_nan(values, tf.cast(weight, values.dtype)), gradient
    )


def counted(value: Any, weight: Any) -> Any:
    """Returns a replica's term of a sum: its value, or zeros (even for NaN) if it is empty."""
    if isinstance(weight, float):
        return value

    def or_zeros(values: Any) -> tf.Tensor:
        values = tf.convert_to_tensor(values)
        return tf.where(weight > 0, values, tf.zeros_like(values))

    return on_values(or_zeros, value)


def summed(parts: Sequence[Any]) -> Any:
    """Returns the sum of the replicas' gradients of one variable, None where there is none."""
    parts = [part for part in parts if part is not None]
    if not parts:
        return None
    check_summable(parts[0].dtype.name)
    if all(isinstance(part, tf.IndexedSlices) for part in parts):
        values = tf.concat([part.values for part in parts], 0)
        indices = tf.concat([part.indices for part in parts], 0)
        return slices_of_all(parts, values, indices)
    return tf.add_n([tf.convert_to_tensor(part) for part in parts])


def slices_of_all(parts: Sequence[Any], values: Any, indices: Any) -> tf.IndexedSlices:
    """Returns the sparse gradient that one device would have for the whole batch.

    An optimizer may square each row, so it matters whether rows of the same index are summed first.
    `Embedding` has one row per lookup: they stay separate. A product with a sparse tensor has one
    row per index: the replicas' rows of the same index are summed.
    """
    if all(_is_of_unique_rows(part.indices) for part in parts):
        indices, places = tf.unique(indices)
        values = tf.math.unsorted_segment_sum(values, places, tf.size(indices))
    return tf.IndexedSlices(values, indices, parts[0].dense_shape)


def _is_of_unique_rows(indices: Any) -> bool:
    """Whether the indices are the result of a `Unique` operation; known in a graph only."""
    if not tf.is_symbolic_tensor(indices):
        return False
    while indices.op.type in ("Cast", "Identity", "Reshape"):
        indices = indices.op.inputs[0]
    return indices.op.type in ("Unique", "UniqueV2")


def divided(total: Any, count: Any) -> Any:
    """Returns a sum divided by a number; a sum of integers becomes a float64."""
    if isinstance(total, tf.distribute.DistributedValues):
        return mirrored([divided(part, count) for part in total.values])
    return on_values(lambda values: values / tf.cast(count, values.dtype), total)
