"""Metrics over replicas: Keras's own add up, all others see the global batch.

The state of a metric that Keras ships is a sum over examples, so each replica updates its own part
with its own rows and the parts are added when the state is read. Of any other metric nothing is
known: its state may be a maximum or a set. As a part of a model that `fit` trains it is updated
with the gathered rows of the global batch, the same on every replica. In custom loops it is as in
``tf.distribute``: each replica updates its part, and reading adds them up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import keras

from kerasdist import context, keras_seam
from kerasdist.binding import bind
from kerasdist.keras_seam import ops
from kerasdist.replica_context import ReplicaContext, one_device_replica
from kerasdist.training.numerics import per_weight

if TYPE_CHECKING:
    from kerasdist.strategy import Strategy

# Metrics of models that `fit` trains or evaluates, whose state is equal on all replicas.
_settled: WeakSet[Any] = WeakSet()


class GlobalBatchMetric:
    """Put before the class of a metric whose state may be no sum."""

    def update_state(self, *args: Any, **kwargs: Any) -> Any:
        """Updates the state with the rows of all replicas; all replicas must call it.

        Args:
            *args: What the metric takes; tensors of at least one dimension are gathered.
            **kwargs: Likewise.
        """
        replica = context.replica()
        if replica is None or self not in _settled:
            return super().update_state(*args, **kwargs)  # type: ignore[misc]
        args, kwargs = _gathered(replica, (args, kwargs))
        # The rows are the global batch's now: metrics inside this one must not gather or weigh
        # again.
        with context.replica_scope(None):
            return super().update_state(*args, **kwargs)  # type: ignore[misc]

    def add_variable(self, *args: Any, **kwargs: Any) -> Any:
        """Makes a state variable; one that is equal on all replicas is no part of a sum."""
        if self in _settled:
            kwargs["aggregation"] = "only_first_replica"
        return super().add_variable(*args, **kwargs)  # type: ignore[misc]


def metrics_of(model: Any) -> Iterator[Any]:
    """Yields the metrics of a model, those that it was compiled with one by one.

    Args:
        model: A Keras model. Before its first step, Keras has not yet made the metrics that were
            given by name or as a function; they are left out.
    """
    for metric in model.metrics:
        if not isinstance(metric, keras_seam.CompileMetrics):
            yield metric
        elif metric.built:
            yield from metric.metrics
        else:
            yield from keras_seam.given_metrics(metric)


def settle(metric: Any, strategy: Strategy) -> None:
    """Makes all state of a metric that Keras does not ship equal on all replicas.

    That is the state of Keras's metrics inside of it, too, since they see the global batch with it,
    and the state of a metric that was made outside of the scope.

    Args:
        metric: A metric of a model, before the first step is compiled.
        strategy: The model's strategy.
    """
    if metric in _settled or keras_seam.is_kerass_own(type(metric)):
        return
    bind(metric, GlobalBatchMetric)
    _settled.add(metric)
    for variable in metric.variables:
        if variable.aggregation == "sum":
            # Not the variable's own value, which is the sum over the replicas.
            value = ops.convert_to_numpy(strategy.runner.local_results(variable)[0])
            keras_seam.change_aggregation(variable, "only_first_replica", value)


def _gathered(replica: ReplicaContext, structure: Any) -> Any:
    def gather(leaf: Any) -> Any:
        if leaf is None or isinstance(leaf, str | bool | int | float):
            return leaf
        tensor = ops.convert_to_tensor(leaf)
        return replica.collectives.all_gather(tensor) if len(tensor.shape) else tensor

    return keras.tree.map_structure(gather, structure)


def metric_created(original: Callable[..., None], metric: Any, *args: Any, **kwargs: Any) -> None:
    """Lets a metric that Keras does not ship see the global batch, if it is made in a scope.

    Args:
        original: Keras's ``Metric.__init__``.
        metric: The metric.
        *args: As Keras's.
        **kwargs: As Keras's.
    """
    original(metric, *args, **kwargs)
    if context.has_strategy() and not keras_seam.is_kerass_own(type(metric)):
        bind(metric, GlobalBatchMetric)


def update_wrapped(
    original: Callable[..., Any], metric: Any, y_true: Any, y_pred: Any, sample_weight: Any = None
) -> Any:
    """Updates a metric made from a function, ``keras.metrics.MeanMetricWrapper``.

    A function that returns one value an example is exact on the replica's own rows. One that
    returns a scalar may mix examples, so it gets the rows of all replicas; all replicas must call
    it.

    Args:
        original: Keras's own function.
        metric: The metric.
        y_true: As Keras's.
        y_pred: As Keras's.
        sample_weight: As Keras's.
    """
    replica = one_device_replica()
    if replica is not None and not keras_seam.is_kerass_own(metric._fn):
        local = metric._fn(y_true, y_pred, **metric._fn_kwargs)
        if _is_scalar(local):
            y_true, y_pred, sample_weight = _gathered(replica, (y_true, y_pred, sample_weight))
    return original(metric, y_true, y_pred, sample_weight)


def update_mean(
    original: Callable[..., Any], metric: Any, values: Any, sample_weight: Any = None
) -> Any:
    """Updates ``keras.metrics.Mean`` or ``Sum``.

    A scalar, such as the loss of a batch, is a mean over the replica's own examples: it counts by
    the replica's share of the batch, so that all replicas together add one value with weight 1.

    Args:
        original: Keras's own function.
        metric: The metric.
        values: As Keras's.
        sample_weight: As Keras's. A scalar with a weight of its own, such as Keras's loss with the
            number of examples, is taken as it is; a replica without example adds nothing.
    """
    replica = one_device_replica()
    if replica is None:
        return original(metric, values, sample_weight)
    weight = replica.weight
    if not _is_scalar(values):
        if _is_number_of_rows(sample_weight):
            # Keras's loss without reduction: each value counts by the rows of the global batch.
            sample_weight = per_weight(ops.cast(sample_weight, metric.dtype), weight)
        return original(metric, values, sample_weight)
    if not isinstance(weight, float):
        # A replica without example: its mean is NaN, and NaN times 0 would stay NaN.
        values = ops.convert_to_tensor(values, dtype=metric.dtype)
        values = ops.where(weight > 0, values, ops.zeros_like(values))
    return original(metric, values, weight if sample_weight is None else sample_weight)


def _is_scalar(value: Any) -> bool:
    """Whether a value, which a user's function may return as a plain number, has no dimension."""
    return len(ops.convert_to_tensor(value).shape) == 0


def _is_number_of_rows(sample_weight: Any) -> bool:
    return (
        keras.ops.is_tensor(sample_weight)
        and len(sample_weight.shape) == 0
        and keras.backend.is_int_dtype(sample_weight.dtype)
    )
