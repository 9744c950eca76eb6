"""BatchNormalization on replicas: which rows it normalises by, and what its moving statistics are.

In `fit` a layer normalises by the global batch, as on one device, unless the strategy has
``batch_norm="per_replica"``. In custom loops, as in ``tf.distribute``, a layer normalises by its
replica's own rows, unless the layer has ``synchronized=True`` or the strategy has
``batch_norm="synchronized"``. If the layer is not synchronized, each replica of a custom loop has
its own moving statistics, and code outside of replicas reads their mean, as in ``tf_keras``. (Keras
3 does not take this mean, so under ``tf.distribute`` only the first replica's statistics count.)

One all-gather is enough to compute the mean and variance of the global batch. Each replica sends
the number, the mean and the squared deviations of its values, and all replicas combine these in the
same way (Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample
variances", 1979). Unlike a sum of squares, this method is exact even if the mean is much larger
than the deviation. A replica without rows has no effect. The size of the gathered values grows with
the number of replicas, so more than `MOST_GATHERED` replicas use two all-reduces instead: one for
the mean, and one for the squared deviations from the mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache
from typing import Any

import keras

from kerasdist import keras_compat
from kerasdist.backends.base.collectives import Collectives, SoleReplica
from kerasdist.core.context import ReplicaLike, current, scoped_strategy
from kerasdist.keras_compat import internals, ops

Original = Callable[..., Any]

# Up to this number of replicas one all-gather is used, and beyond it two small all-reduces.
# For 1,024 channels, 64 replicas together gather 0.8 MB. This takes about as long as a second
# all-reduce needs to start.
MOST_GATHERED = 64


def layer_created(original: Original, layer: Any, *args: Any, **kwargs: Any) -> None:
    """Allows ``synchronized=True`` in a scope, even on backends on which Keras refuses it."""
    if keras_compat.KNOWS_SYNCHRONIZED or scoped_strategy() is None:
        original(layer, *args, **kwargs)
        return
    synchronized = kwargs.pop("synchronized", False)
    original(layer, *args, **kwargs)
    layer.synchronized = synchronized


def statistics_options(options: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments with which Keras must make a variable; `options` are the given ones.

    They differ from `options` only for moving statistics of BatchNormalization, which the replicas
    must average.
    """
    strategy = scoped_strategy()
    if options.get("trainable", True) or strategy is None or strategy.num_replicas_in_sync == 1:
        return options
    maker = keras_compat.maker_of_variable() if internals.NAME_SCOPES.is_there() else None
    if not isinstance(maker, keras.layers.BatchNormalization):
        return options
    synchronization = _synchronization(strategy.options.batch_norm)
    return options | {"aggregation": "mean", "synchronization": synchronization}


def _synchronization(batch_norm: str | None) -> str:
    """Returns the `synchronization` of moving statistics, which are means over the replicas.

    With ``"per_replica"`` each assignment computes the mean of the replicas' values; in `fit` each
    value is weighted by its replica's rows. Otherwise each read of the variable computes the mean.
    """
    return "auto" if batch_norm == "per_replica" else "on_read"


def called(original: Original, layer: keras.Layer, *args: object, **kwargs: object) -> Any:
    """Calls a BatchNormalization layer; if it is synchronized, all replicas get equal statistics.

    In custom loops, moving statistics that were made outside of the scope behave as if they were
    made inside.
    """
    replica = current.replica
    if replica is None:
        return original(layer, *args, **kwargs)
    _require_places()
    if replica.local_batch is None and replica.num_replicas_in_sync > 1:
        keep_statistics(layer, replica.strategy.options.batch_norm)
    is_alike = _is_synchronized(replica, layer)
    with replica.collectives.equal_writes() if is_alike else nullcontext():
        return original(layer, *args, **kwargs)


@cache
def _require_places() -> None:
    internals.BATCH_MOMENTS.require()
    internals.NAME_SCOPES.require()


def keep_statistics(layer: Any, batch_norm: str | None) -> None:
    """Sets how replicas aggregate moving statistics that were made outside of the scope."""
    for variable in (layer.moving_mean, layer.moving_variance):
        if variable.aggregation == "none":  # made outside of every scope
            keras_compat.set_replication(variable, _synchronization(batch_norm), "mean")


def moments(original: Original, layer: Any, inputs: Any, mask: Any) -> tuple[Any, Any]:
    """Returns the mean and variance of the global batch, or of a replica's own rows."""
    replica = current.replica
    if replica is None:
        if not layer.synchronized or keras_compat.KNOWS_SYNCHRONIZED:
            return original(layer, inputs, mask)
        # Keras cannot synchronize on this backend, but outside of replicas `inputs` has all rows.
        return global_moments(SoleReplica(), 1, inputs, reduced_axes(layer, inputs), mask)
    axes = reduced_axes(layer, inputs)
    if _is_synchronized(replica, layer):
        replicas = replica.num_replicas_in_sync
        return global_moments(replica.collectives, replicas, inputs, axes, mask)
    own_moments = replica.collectives.own_moments
    own = own_moments(inputs, axes) if mask is None else None
    mean, variance = own or original(layer, inputs, mask)
    rows = ops.shape(inputs)[0] if replica.local_batch is None else replica.local_batch.size
    if isinstance(rows, int) and rows > 0:
        return mean, variance
    # An empty replica has no statistics of its own, so the moving statistics are returned.
    return (
        ops.where(rows > 0, mean, ops.cast(layer.moving_mean, mean.dtype)),
        ops.where(rows > 0, variance, ops.cast(layer.moving_variance, variance.dtype)),
    )


def reduced_axes(layer: Any, inputs: Any) -> tuple[int, ...]:
    """Returns the axes over which a layer normalises: all but the axis of the channels."""
    rank = len(inputs.shape)
    channels = layer.axis % rank
    return (*range(channels), *range(channels + 1, rank))


def _is_synchronized(replica: ReplicaLike, layer: Any) -> bool:
    if layer.synchronized:
        return True
    norm = replica.strategy.options.batch_norm
    return norm == "synchronized" if replica.local_batch is None else norm != "per_replica"


def global_moments(
    collectives: Collectives, replicas: int, inputs: object, axes: Sequence[int], mask: object
) -> tuple[Any, Any]:
    """Returns the mean and variance over the rows of all replicas; both are differentiable.

    All replicas must call this function.
    """
    if mask is None and replicas <= MOST_GATHERED:
        found = collectives.all_moments(inputs, axes)
        if found is not None:
            return found
    own = collectives.own_moments(inputs, axes) if mask is None else None
    if own is None:
        count, mean, squares = _of_some(inputs, axes, mask)
    else:
        mean, variance = own
        # `ones_like` makes the ones on the device. If the number were converted to a tensor,
        # this thread would have to wait until the number is copied from the host.
        count = ops.ones_like(mean) * _number(inputs, axes)
        squares = variance * count

    # Each replica sends three values per channel: the count, the mean and the squared deviations.
    row = ops.stack([ops.broadcast_to(count, ops.shape(mean)), mean, squares])
    row = ops.reshape(row, (3, -1))
    if replicas <= MOST_GATHERED:
        rows = collectives.all_stack(row)
        return combined(rows[:, 0], rows[:, 1], rows[:, 2], added_to_count(mask))
    count, mean, squares = row[0], row[1], row[2]
    [totals] = collectives.all_sum([ops.stack([count, count * mean])])
    divisor = totals[0] + added_to_count(mask)
    global_mean = totals[1] / divisor
    [spread] = collectives.all_sum([squares + count * ops.square(mean - global_mean)])
    return global_mean, spread / divisor


def added_to_count(mask: object) -> float:
    """Returns what Keras adds to the number of values: epsilon if there is a mask, else 0."""
    return 0.0 if mask is None else keras.config.epsilon()


def combined(counts: Any, means: Any, squares: Any, added: float) -> tuple[Any, Any]:
    """Returns the mean and the variance of all replicas' values together.

    Args:
        counts: The number of values of each replica. In this array and the next two, axis 0 runs
            over the replicas.
        means: The mean of each replica's values.
        squares: The sum of the squared deviations of each replica's values from their mean.
        added: A number that is added to the count of all values.
    """
    divisor = ops.sum(counts, 0) + added
    global_mean = ops.sum(counts * means, 0) / divisor
    spread = squares + counts * ops.square(means - global_mean)
    return global_mean, ops.sum(spread, 0) / divisor


def _of_some(inputs: Any, axes: Sequence[int], mask: Any) -> tuple[Any, Any, Any]:
    """Returns the count, mean and summed squared deviations of a replica's unmasked values."""
    weights = ops.ones_like(inputs)
    if mask is not None:
        weights = weights * ops.cast(ops.expand_dims(mask, -1), inputs.dtype)
    count = ops.sum(weights, axes, keepdims=True)
    total = ops.sum(ops.where(weights > 0, inputs, 0), axes, keepdims=True)
    mean = total / ops.maximum(count, 1)
    deviation = ops.where(weights > 0, inputs - mean, 0)
    return count, mean, ops.sum(ops.square(deviation), axes, keepdims=True)


def _number(inputs: Any, axes: Sequence[int]) -> Any:
    """Returns the number of values per channel.

    It is an int, or a scalar tensor if the shape is not known before the step runs.
    """
    number = math.prod([ops.shape(inputs)[axis] for axis in axes])
    return number if isinstance(number, int) else ops.cast(number, inputs.dtype)
