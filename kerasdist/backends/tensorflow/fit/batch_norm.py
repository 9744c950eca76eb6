"""Mean and variance of a replica's own rows, in as few passes over memory as on one device."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf


def moments(inputs: tf.Tensor, axes: Sequence[int]) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns mean and variance of each channel; zeros without rows.

    They are the operations of plain Keras, whose gradient takes one pass: it does not follow the
    mean into the variance, on which it has no effect.
    """
    mean, variance = (tf.reshape(one, [-1]) for one in tf.nn.moments(inputs, axes))
    if inputs.shape.num_elements():  # known, and not zero
        return mean, variance
    has_rows = tf.size(inputs) > 0
    return tf.where(has_rows, mean, 0), tf.where(has_rows, variance, 0)
