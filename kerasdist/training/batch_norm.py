"""BatchNormalization on replicas: which rows it normalises by, and its moving statistics.

In `fit` a layer normalises by the global batch, as on one device, unless the strategy says
otherwise. In custom loops, as in ``tf.distribute``, it normalises by its replica's own rows unless
the layer or the strategy is synchronized. There each replica has a component of the moving
statistics, and code outside of replicas reads the components' mean (as in ``tf_keras``; Keras 3
left that out, so that only the first replica's component counts there).
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, final

from kerasdist import keras_compat
from kerasdist.backends.base.single_replica import SoleReplica
from kerasdist.core import context
from kerasdist.keras_compat import ops
from kerasdist.training.normalization import global_moments

if TYPE_CHECKING:
    import keras

    from kerasdist.core.protocols import ReplicaLike

Original = Callable[..., Any]


def layer_created(original: Original, layer: Any, *args: Any, **kwargs: Any) -> None:
    """Lets a layer be synchronized in a scope, on the backends where Keras itself refuses it."""
    if keras_compat.KNOWS_SYNCHRONIZED or context.scoped_strategy() is None:
        original(layer, *args, **kwargs)
        return
    call = inspect.signature(original).bind(layer, *args, **kwargs)
    synchronized = call.arguments.pop("synchronized", False)
    original(*call.args, **call.kwargs)
    layer.synchronized = synchronized


@final
class _Making(threading.local):
    """Whether the calling thread is creating moving statistics."""

    statistics = False


_making = _Making()


def weight_made(original: Original, layer: keras.Layer, *args: object, **kwargs: object) -> Any:
    """Makes moving statistics that replicas aggregate by their mean."""
    strategy = context.scoped_strategy()
    if kwargs.get("trainable", True) or strategy is None or strategy.num_replicas_in_sync == 1:
        return original(layer, *args, **kwargs)
    kwargs["aggregation"] = "mean"
    if strategy.options.batch_norm == "per_replica":
        # Each assignment averages the replicas' values, in `fit` weighted by their shares.
        return original(layer, *args, **kwargs)
    _making.statistics = True
    try:
        return original(layer, *args, **kwargs)
    finally:
        _making.statistics = False


def statistics_options(options: dict[str, Any]) -> dict[str, Any]:
    """Returns a variable's arguments; for moving statistics, with sync-on-read added."""
    return options | {"synchronization": "on_read"} if _making.statistics else options


def called(original: Original, layer: keras.Layer, *args: object, **kwargs: object) -> Any:
    """Lets custom loops treat statistics made outside of the scope as those made in it."""
    replica = context.replica()
    if replica is not None and replica.share is None and replica.num_replicas_in_sync > 1:
        # A variable with the aggregation "none" was made outside of every scope.
        keep_statistics(
            layer,
            replica.strategy.options.batch_norm,
            lambda variable: variable.aggregation == "none",
        )
    return original(layer, *args, **kwargs)


def keep_statistics(layer: Any, batch_norm: str | None, is_outside: Callable[[Any], bool]) -> None:
    """Sets how replicas aggregate moving statistics that were made outside of the scope."""
    synchronization = "auto" if batch_norm == "per_replica" else "on_read"
    for variable in (layer.moving_mean, layer.moving_variance):
        if is_outside(variable):
            keras_compat.set_replication(variable, synchronization, "mean")


def moments(original: Original, layer: Any, inputs: Any, mask: Any) -> tuple[Any, Any]:
    """Returns mean and variance of a batch: the global one, or a replica's own rows."""
    replica = context.replica()
    if replica is None:
        if not layer.synchronized or keras_compat.KNOWS_SYNCHRONIZED:
            return original(layer, inputs, mask)
        # Keras refuses to synchronize on this backend, but here `inputs` is the whole batch.
        return global_moments(SoleReplica(), inputs, layer._reduction_axes, mask)
    if _is_synchronized(replica, layer):
        # A tuple: torch's compiler knows nothing of Keras's lists.
        return global_moments(replica.collectives, inputs, tuple(layer._reduction_axes), mask)
    kernel = replica.collectives.own_moments if mask is None else None
    own = kernel and kernel(inputs, tuple(layer._reduction_axes))
    mean, variance = own or original(layer, inputs, mask)
    rows = ops.shape(inputs)[0] if replica.share is None else replica.share.size
    if isinstance(rows, int) and rows > 0:
        return mean, variance
    # An empty replica has no statistics, so it leaves the moving ones as they are.
    return (
        ops.where(rows > 0, mean, ops.cast(layer.moving_mean, mean.dtype)),
        ops.where(rows > 0, variance, ops.cast(layer.moving_variance, variance.dtype)),
    )


def _is_synchronized(replica: ReplicaLike, layer: Any) -> bool:
    if layer.synchronized:
        return True
    norm = replica.strategy.options.batch_norm
    return norm == "synchronized" if replica.share is None else norm != "per_replica"
