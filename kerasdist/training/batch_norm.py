"""BatchNormalization on replicas: whose rows it normalises by, and whose statistics it keeps.

In `fit` it sees the global batch, as on one device, unless the strategy says otherwise. In custom
loops it is as in ``tf.distribute``: a layer normalises by its replica's own rows unless it, or the
strategy, is told to be synchronized. There its moving statistics are a component a replica, whose
mean is read outside of replicas (as those of ``tf_keras`` were; Keras 3 left that out, so that the
first replica's counted).
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, final

from kerasdist import context, keras_seam
from kerasdist.backends.sole import SoleReplica
from kerasdist.keras_seam import ops
from kerasdist.training.normalization import global_moments

if TYPE_CHECKING:
    from kerasdist.replica_context import ReplicaContext

Original = Callable[..., Any]


def layer_created(original: Original, layer: Any, *args: Any, **kwargs: Any) -> None:
    """Lets a layer be synchronized in a scope on the backends where Keras itself refuses it.

    Args:
        original: Keras's ``BatchNormalization.__init__``.
        layer: The layer.
        *args: As Keras's.
        **kwargs: As Keras's.
    """
    if keras_seam.KNOWS_SYNCHRONIZED or context.scoped_strategy() is None:
        original(layer, *args, **kwargs)
        return
    call = inspect.signature(original).bind(layer, *args, **kwargs)
    synchronized = call.arguments.pop("synchronized", False)
    original(*call.args, **call.kwargs)
    layer.synchronized = synchronized


@final
class _Making(threading.local):
    """Whether the calling thread makes moving statistics."""

    statistics = False


_making = _Making()


def weight_made(original: Original, layer: Any, *args: Any, **kwargs: Any) -> Any:
    """Lets replicas that keep moving statistics of their own agree on the mean.

    Args:
        original: Keras's ``BatchNormalization.add_weight``.
        layer: The layer.
        *args: As Keras's.
        **kwargs: As Keras's.
    """
    strategy = context.scoped_strategy()
    if kwargs.get("trainable", True) or strategy is None or strategy.num_replicas_in_sync == 1:
        return original(layer, *args, **kwargs)
    kwargs["aggregation"] = "mean"
    if strategy.options.batch_norm == "per_replica":
        # At once, so that each replica counts by its share of the examples.
        return original(layer, *args, **kwargs)
    _making.statistics = True
    try:
        return original(layer, *args, **kwargs)
    finally:
        _making.statistics = False


def statistics_options(options: dict[str, Any]) -> dict[str, Any]:
    """Returns how a variable is to be made, of which a layer cannot say all.

    Args:
        options: Keyword arguments of ``keras.Variable``.
    """
    return options | {"synchronization": "on_read"} if _making.statistics else options


def called(original: Original, layer: Any, *args: Any, **kwargs: Any) -> Any:
    """Lets custom loops keep statistics that were made outside as those that are made in the scope.

    Args:
        original: Keras's ``BatchNormalization.call``.
        layer: The layer.
        *args: As Keras's.
        **kwargs: As Keras's.
    """
    replica = context.replica()
    if replica is not None and replica.share is None and replica.num_replicas_in_sync > 1:
        # No variable of a strategy has this aggregation.
        keep_statistics(
            layer,
            replica.strategy.options.batch_norm,
            lambda variable: variable.aggregation == "none",
        )
    return original(layer, *args, **kwargs)


def keep_statistics(layer: Any, batch_norm: str | None, is_outside: Callable[[Any], bool]) -> None:
    """Says how replicas will keep moving statistics that were made outside of the scope.

    Args:
        layer: A ``BatchNormalization`` that is built.
        batch_norm: How the strategy wants moving statistics kept.
        is_outside: Returns whether a variable was made outside.
    """
    synchronization = "auto" if batch_norm == "per_replica" else "on_read"
    for variable in (layer.moving_mean, layer.moving_variance):
        if is_outside(variable):
            keras_seam.set_replication(variable, synchronization, "mean")


def moments(original: Original, layer: Any, inputs: Any, mask: Any) -> tuple[Any, Any]:
    """Returns mean and variance of a batch: the global one, or a replica's own rows.

    Args:
        original: Keras's ``BatchNormalization._moments``.
        layer: The layer.
        inputs: What it normalises.
        mask: None, or which rows count.
    """
    replica = context.replica()
    if replica is None:
        if not layer.synchronized or keras_seam.KNOWS_SYNCHRONIZED:
            return original(layer, inputs, mask)
        # Where Keras refuses to synchronize, this code has the whole batch on any backend.
        return global_moments(SoleReplica(), inputs, layer._reduction_axes, mask)
    if _is_synchronized(replica, layer):
        return global_moments(replica.collectives, inputs, layer._reduction_axes, mask)
    mean, variance = original(layer, inputs, mask)
    rows = ops.shape(inputs)[0] if replica.share is None else replica.share.size
    if isinstance(rows, int) and rows > 0:
        return mean, variance
    # A replica without example has no statistics, so it leaves the moving ones as they are.
    return (
        ops.where(rows > 0, mean, ops.cast(layer.moving_mean, mean.dtype)),
        ops.where(rows > 0, variance, ops.cast(layer.moving_variance, variance.dtype)),
    )


def _is_synchronized(replica: ReplicaContext, layer: Any) -> bool:
    if layer.synchronized:
        return True
    norm = replica.strategy.options.batch_norm
    return norm == "synchronized" if replica.share is None else norm != "per_replica"
