"""Losses that are differentiated as one value for each example, as in keras.io's siamese network.

``tape.gradient`` of a vector is the gradient of the sum of its values. On one device that sum goes
over the global batch, in a replica over the replica's rows; `optimizer.apply` then weights what it
gets with the replica's share. So the share is taken out here, and the replicas' gradients add up to
those of the sum over all examples.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import keras
import tensorflow as tf

from kerasdist.backends.tensorflow.engine_seam import install_tape_gradient
from kerasdist.replica_context import BatchShare, one_device_replica


@cache
def install() -> None:
    """Puts the hook into TensorFlow's gradient tape, once in a process."""
    install_tape_gradient(_gradient)


def _gradient(
    original: Callable[..., Any], tape: Any, target: Any, sources: Any, *args: Any, **kwargs: Any
) -> Any:
    gradients = original(tape, target, sources, *args, **kwargs)
    replica = one_device_replica()
    if replica is None:
        return gradients
    factor = _factor(replica.share, target)
    if factor is None:
        return gradients
    flat = [
        # By a tensor, such as the input in a gradient penalty, it is a gradient for each example.
        _scaled(gradient, factor) if isinstance(source, keras.Variable | tf.Variable) else gradient
        for gradient, source in zip(
            tf.nest.flatten(gradients), tf.nest.flatten(sources), strict=True
        )
    ]
    return tf.nest.pack_sequence_as(gradients, flat)


def _scaled(gradient: Any, factor: Any) -> Any:
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        values = _scaled(gradient.values, factor)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return gradient * tf.cast(factor, gradient.dtype)


def _factor(share: BatchShare | None, target: Any) -> Any:
    """What the gradients of a target lack; None where it is not one value for each example."""
    targets = [one for one in tf.nest.flatten(target) if tf.is_tensor(one)]
    # A scalar among them would have to be differentiated by itself.
    if share is None or not targets or any(one.shape.rank in (0, None) for one in targets):
        return None
    # In a graph a size that is known does not depend on the batch, unless the batch's is known too.
    expected = share.size if isinstance(share.size, int) else None
    if any(one.shape[0] != expected for one in targets):
        return None
    if isinstance(share.weight, float):
        return 1.0 / share.weight
    per_weight = tf.math.divide_no_nan(tf.ones_like(share.weight), share.weight)
    if expected is not None:
        return per_weight
    have_rows = [tf.equal(tf.shape(one)[0], share.size) for one in targets]
    return tf.where(tf.reduce_all(have_rows), per_weight, tf.ones_like(per_weight))
