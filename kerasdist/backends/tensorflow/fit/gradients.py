"""Gradients on TensorFlow: weighted gradients, their sums, and gradients of vector losses.

A vector loss has one value per example, as in keras.io's siamese network. ``tape.gradient`` of a
vector is the gradient of the sum of its values. On one device this sum is over the global batch,
but in a replica it is over the replica's rows. `optimizer.apply` then multiplies each replica's
gradients by the replica's weight, which is its fraction of the global batch's rows. So this module
divides the gradients of a vector loss by that fraction. The replicas' gradients then add up to the
gradient of the sum over all examples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial, wraps
from typing import Any

import keras
import tensorflow as tf

from kerasdist.api.replica_context import LocalBatch
from kerasdist.backends.base.checks import check_summable
from kerasdist.backends.tensorflow.private.lookups import are_unique, merged
from kerasdist.backends.tensorflow.private.strategies import mirrored, ours
from kerasdist.backends.tensorflow.replica.variables import copies
from kerasdist.core.context import current


def on_values(function: Callable[[Any], Any], gradient: object) -> Any:
    """Applies a function to a gradient, or to the values of a sparse gradient."""
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        values = function(gradient.values)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return function(gradient)


def weighted(gradient: Any, weight: Any) -> Any:
    """Returns a gradient times a replica's weight; 0 if the weight is 0, even for a NaN.

    The function does the same as `training.numerics.weighted` in one operation, and supports sparse
    gradients.
    """
    if isinstance(weight, float):
        return on_values(lambda values: values * weight, gradient)
    return on_values(
        lambda values: tf.math.multiply_no_nan(values, tf.cast(weight, values.dtype)), gradient
    )


def counted(value: Any, weight: Any) -> Any:
    """Returns what a replica adds to a sum: its value, or zeros if the replica has no rows.

    Without rows, the result is zeros even if the value is a NaN.
    """
    if isinstance(weight, float):
        return value

    def or_zeros(values: Any) -> tf.Tensor:
        values = tf.convert_to_tensor(values)
        return tf.where(weight > 0, values, tf.zeros_like(values))

    return on_values(or_zeros, value)


def summed(parts: Sequence[Any]) -> Any:
    """Returns the sum of the replicas' tensors."""
    check_summable(parts[0].dtype.name)
    return tf.add_n([tf.convert_to_tensor(part) for part in parts])


def slices_of_all(parts: Sequence[Any], values: Any, indices: Any) -> tf.IndexedSlices:
    """Returns the sparse gradient that one device would have for the whole batch.

    An optimizer may square each row, so it matters whether rows of the same index are summed first.
    The gradient of an `Embedding` has one row per lookup, and these rows stay separate. The
    gradient of a product with a sparse tensor has one row per index, so the replicas' rows of the
    same index are summed.
    """
    slices = tf.IndexedSlices(values, indices, parts[0].dense_shape)
    return merged(slices) if all(are_unique(part.indices) for part in parts) else slices


def divide(total: Any, count: Any) -> Any:
    """Returns a sum divided by a number; a sum of integers becomes a float64."""
    if isinstance(total, tf.distribute.DistributedValues):
        return mirrored([divide(part, count) for part in total.values])
    return on_values(lambda values: values / tf.cast(count, values.dtype), total)


@cache
def install() -> None:
    """Makes ``tf.GradientTape.gradient`` call `_gradient` below, in the whole process."""
    tape_class: Any = tf.GradientTape
    original = tape_class.gradient

    @wraps(original)
    def gradient(tape: object, target: object, sources: object, *args: Any, **kwargs: Any) -> Any:
        return _gradient(partial(original, tape), target, sources, *args, **kwargs)

    tape_class.gradient = gradient


def _gradient(
    original: Callable[..., Any],
    target: object,
    sources: object,
    output_gradients: object = None,
    *args: object,
    **kwargs: object,
) -> Any:
    if tf.distribute.in_cross_replica_context() and tf.distribute.get_strategy() in ours:
        # Cross-replica code reads the first copy of a variable, so TensorFlow must differentiate
        # with respect to that copy.
        sources = tf.nest.map_structure(lambda one: copies(one)[0], sources)
    replica = current.fit_replica
    if replica is None:
        return original(target, sources, output_gradients, *args, **kwargs)
    original = partial(replica.collectives.differentiate, original)
    factor = _factor(replica.local_batch, target)
    if factor is None:
        return original(target, sources, output_gradients, *args, **kwargs)
    # If the loss was computed with collectives, their backward pass multiplies the gradients of
    # each replica by the replica's weight (its fraction of the rows). These gradients must already
    # contain `factor`. So `factor` multiplies the upstream gradients, with which the backward pass
    # begins, and not the gradients that the tape returns.
    targets = tf.nest.flatten(target)
    given = [None] * len(targets) if output_gradients is None else tf.nest.flatten(output_gradients)
    upstream = [
        tf.cast(factor, one.dtype) * (tf.ones_like(one) if each is None else each)
        for one, each in zip(targets, given, strict=True)
    ]
    gradients = original(targets, sources, upstream, *args, **kwargs)

    def unscaled(source: object, gradient: object) -> Any:
        if isinstance(source, keras.Variable | tf.Variable):
            return gradient
        # A gradient with respect to an input, as in a gradient penalty, has one row per example.
        # `factor` cancels the replica's weight, by which only the gradients of variables are
        # multiplied later. So a gradient of an input is divided by `factor` again.
        return on_values(
            lambda values: tf.math.divide_no_nan(values, tf.cast(factor, values.dtype)), gradient
        )

    flat = list(map(unscaled, tf.nest.flatten(sources), tf.nest.flatten(gradients)))
    return tf.nest.pack_sequence_as(gradients, flat)


def _factor(local_batch: LocalBatch | None, target: object) -> Any:
    """Returns the factor for the gradients of a vector loss; None for every other target."""
    targets = [one for one in tf.nest.flatten(target) if tf.is_tensor(one)]
    # If one target is a scalar, the tape returns one sum, from which the gradients of the vectors
    # cannot be separated.
    if local_batch is None or not targets or any(one.shape.rank in (0, None) for one in targets):
        return None
    # In a graph, a target's static size is the number of examples only if the batch also has a
    # static size.
    is_known = isinstance(local_batch.size, int) or tf.executing_eagerly()
    expected = int(local_batch.size) if is_known else None
    if any(one.shape[0] != expected for one in targets):
        return None
    if isinstance(local_batch.weight, float):
        return 1.0 / local_batch.weight
    per_weight = tf.math.divide_no_nan(tf.ones_like(local_batch.weight), local_batch.weight)
    if expected is not None:
        return per_weight
    have_rows = [tf.equal(tf.shape(one)[0], local_batch.size) for one in targets]
    return tf.where(tf.reduce_all(have_rows), per_weight, tf.ones_like(per_weight))
