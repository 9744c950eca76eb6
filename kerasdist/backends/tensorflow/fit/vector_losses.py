"""Gradients of vector losses, and gradients outside of replicas.

A vector loss has one value per example, as in keras.io's siamese network.
``tape.gradient`` of a vector is the gradient of the sum of its values. On one device that sum goes
over the global batch, in a replica over the replica's rows; `optimizer.apply` then multiplies each
replica's gradients by its weight. So they are divided by the weight here: then the replicas'
gradients add up to the gradient of the sum over all examples.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import keras
import tensorflow as tf

from kerasdist.api.replica_context import BatchShare
from kerasdist.backends.tensorflow.fit.gradients import on_values
from kerasdist.backends.tensorflow.private.patches import install_tape_gradient
from kerasdist.backends.tensorflow.replica.variables import copies
from kerasdist.core.context import one_device_replica


@cache
def install() -> None:
    """Puts the hook into TensorFlow's gradient tape, once in a process."""
    install_tape_gradient(_gradient)


def _gradient(
    original: Callable[..., Any],
    tape: object,
    target: object,
    sources: object,
    *args: object,
    **kwargs: object,
) -> Any:
    if tf.distribute.in_cross_replica_context():
        # Code in a scope reads the first copy; TensorFlow refuses to ask which one it read.
        sources = tf.nest.map_structure(lambda one: copies(one)[0], sources)
    gradients = original(tape, target, sources, *args, **kwargs)
    replica = one_device_replica()
    if replica is None:
        return gradients
    factor = _factor(replica.share, target)
    if factor is None:
        return gradients

    def scaled(gradient: Any) -> Any:
        return gradient * tf.cast(factor, gradient.dtype)

    flat = [
        # A gradient by a tensor, such as the input in a gradient penalty, has a row per example.
        on_values(scaled, gradient)
        if isinstance(source, keras.Variable | tf.Variable)
        else gradient
        for gradient, source in zip(
            tf.nest.flatten(gradients), tf.nest.flatten(sources), strict=True
        )
    ]
    return tf.nest.pack_sequence_as(gradients, flat)


def _factor(share: BatchShare | None, target: object) -> Any:
    """Returns the factor for a target's gradients; None unless it has one value per example."""
    targets = [one for one in tf.nest.flatten(target) if tf.is_tensor(one)]
    # With a scalar among the targets, the gradients of the vectors alone are not known.
    if share is None or not targets or any(one.shape.rank in (0, None) for one in targets):
        return None
    # In a graph, a static size is a number of examples only if the batch has a static size too.
    is_known = isinstance(share.size, int) or tf.executing_eagerly()
    expected = int(share.size) if is_known else None
    if any(one.shape[0] != expected for one in targets):
        return None
    if isinstance(share.weight, float):
        return 1.0 / share.weight
    per_weight = tf.math.divide_no_nan(tf.ones_like(share.weight), share.weight)
    if expected is not None:
        return per_weight
    have_rows = [tf.equal(tf.shape(one)[0], share.size) for one in targets]
    return tf.where(tf.reduce_all(have_rows), per_weight, tf.ones_like(per_weight))
