"""Metrics over replicas: Keras's own add up, all others see the global batch.

In a step of `fit`, what a metric returns is the result over all replicas, so that whatever a step
makes of it, under whatever name, is what one device makes of it.

The state of a metric that Keras ships is a sum over examples (of batches, for the few functions
that `ReplicatedWrapper` gives all rows), so each replica updates its own part with its own rows,
and the parts are added when the state is read. The state of any other metric may be something else,
such as a maximum or a set. If it belongs to a model that `fit` trains, each replica updates it with
the gathered rows of the global batch. In custom loops such a metric works as in ``tf.distribute``:
each replica updates its part, and the parts are added when it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

import keras

from kerasdist import keras_compat
from kerasdist.backends.base.model_trainer import require_trainer
from kerasdist.core.context import ReplicaLike, current, replica_scope, scoped_strategy, whole_step
from kerasdist.keras_compat import ops
from kerasdist.training import layer_losses, numerics, randomness
from kerasdist.training.binding import bind

if TYPE_CHECKING:
    from kerasdist.api.strategy import Strategy

# Metrics of models that `fit` trains or evaluates, whose state is equal on all replicas.
_of_global_batch: WeakSet[Any] = WeakSet()

# Whether the user's function in a ``MeanMetricWrapper`` returns one value for all examples.
_returns_scalar: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()


class ReplicatedMetric:
    """A mixin for any metric: in a replica's step of `fit`, its result is that of all replicas."""

    def result(self) -> Any:
        """Returns the result over all replicas; all replicas must call it."""
        replica = current.fit_replica
        if replica is None:
            return super().result()  # type: ignore[misc]
        with summed(replica, [self]):
            return super().result()  # type: ignore[misc]

    def reset_state(self) -> None:
        """Resets the state, an empty replica's too."""
        replica = current.fit_replica
        with nullcontext() if replica is None else replica.collectives.equal_writes():
            super().reset_state()  # type: ignore[misc]


class ReplicatedMean(keras.metrics.Mean):
    """Stands before `keras.metrics.Mean`, of which a metric is."""

    def update_state(self, values: Any, sample_weight: Any = None) -> Any:
        """Adds a replica's share of values."""
        return super().update_state(*_shared(values, sample_weight))


class ReplicatedSum(keras.metrics.Sum):
    """Stands before `keras.metrics.Sum`, of which a metric is."""

    def update_state(self, values: Any, sample_weight: Any = None) -> Any:
        """Adds a replica's share of values."""
        return super().update_state(*_shared(values, sample_weight))


class ReplicatedWrapper(keras.metrics.MeanMetricWrapper):
    """Stands before `keras.metrics.MeanMetricWrapper`, of which a metric of a function is."""

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        """Updates the state by a function's values, in a step of `fit` each replica its part.

        A function that returns one value per example is exact on the replica's own rows. One that
        may mix examples gets the rows of all replicas; all replicas must call it. Of a user's
        function the first call tells which it is.
        """
        replica = current.fit_replica
        if replica is None:
            return super().update_state(y_true, y_pred, sample_weight)
        function, arguments = keras_compat.metric_function(self)
        if _mixes(self, function, arguments, y_true, y_pred):
            rows = numerics.gather_rows(replica, (y_true, y_pred, sample_weight))
            if replica.replica_id_in_sync_group:
                return None  # the first replica adds for all
            with replica_scope(None):
                return super().update_state(*rows)
        is_bare = sample_weight is None and _is_one_row(y_pred)
        if is_bare and keras_compat.get_keras_mask(y_pred) is None:
            # A user's function may return a scalar for a single row.
            sample_weight = None if keras_compat.is_builtin(function) else ops.ones((1,))
        return super().update_state(y_true, y_pred, sample_weight)


_KINDS = (ReplicatedWrapper, ReplicatedMean, ReplicatedSum)


def _bind(metric: keras.Metric) -> None:
    """Lets a metric's results be those of all replicas, and its updates a replica's share."""
    behind = [one for one in _KINDS if isinstance(metric, one.__bases__)]
    if ReplicatedWrapper in behind and keras_compat.is_of_examples(metric):
        behind.remove(ReplicatedWrapper)  # Keras's own needs no look at what it computes
    bind(metric, ReplicatedMetric, *behind)


class KnownValues(keras.StatelessScope):
    """Gives variables values, for reading; all else passes to the scope around it."""

    def __init__(self, values: Iterable[tuple[Any, Any]]) -> None:
        super().__init__(values, initialize_variables=False)
        self.own = frozenset(self.state_mapping)
        self._outer = keras_compat.get_stateless_scope()

    def get_current_value(self, variable: keras.Variable) -> Any:
        """Returns a variable's given value, else what the scope around this one returns."""
        if id(variable) in self.own or self._outer is None:
            return super().get_current_value(variable)
        return self._outer.get_current_value(variable)

    def add_update(self, update: tuple[Any, Any]) -> None:
        """Assigns to a variable, as if this scope were not there."""
        if self._outer is not None:
            self._outer.add_update(update)
            return
        variable, value = update
        with keras_compat.outside_stateless_scopes():
            variable.assign(value)


@contextmanager
def summed(replica: ReplicaLike, metrics: Iterable[Any]) -> Iterator[None]:
    """Lets a replica's step of `fit` read the metrics' state as its sum over the replicas.

    All replicas must call it. What one call sums is not summed again in the block.
    """
    scope = keras_compat.get_stateless_scope()
    known = scope.own if isinstance(scope, KnownValues) else ()
    variables = [
        variable
        for metric in metrics
        for variable in metric.variables
        if variable.aggregation == "sum" and id(variable) not in known
    ]
    if not variables:
        yield
        return
    values = replica.collectives.summed(variables)
    with KnownValues(zip(variables, values, strict=True)):
        yield


class GlobalBatchMetric:
    """A mixin for a metric whose state may not be a sum: gives it the global batch."""

    def update_state(self, *args: object, **kwargs: object) -> Any:
        """Updates the state with the rows of all replicas; all replicas must call it."""
        replica = current.replica
        if replica is None or replica.num_replicas_in_sync == 1 or self not in _of_global_batch:
            return super().update_state(*args, **kwargs)  # type: ignore[misc]
        args, kwargs = numerics.gather_rows(replica, (args, kwargs))
        # The rows are the global batch now: metrics inside this one must not gather or weight them.
        with replica_scope(None), whole_step(replica.strategy):
            return super().update_state(*args, **kwargs)  # type: ignore[misc]

    def add_variable(self, *args: object, **kwargs: object) -> Any:
        """Makes a state variable; if it is equal on all replicas, reading does not sum it."""
        if self in _of_global_batch:
            kwargs["aggregation"] = "only_first_replica"
        return super().add_variable(*args, **kwargs)  # type: ignore[misc]


def metrics_of(model: Any) -> Iterator[Any]:
    """Yields the metrics of a model and its layers, and each metric of `compile` by itself."""
    for metric in keras_compat.attached_metrics(model):
        if not keras_compat.is_compile_metrics(metric):
            yield metric
        elif metric.built:
            yield from metric.metrics
        else:
            given = require_trainer(model).given_metrics
            yield from (one for one in given if isinstance(one, keras.metrics.Metric))


def prepare(model: Any, strategy: Strategy) -> None:
    """Prepares the metrics and penalties of a model for `fit`, those from outside, too.

    It refuses losses and draws that could not be exact.
    """
    numerics.require_losses(model)
    randomness.require_draws(model)
    layer_losses.prepare(model)
    for metric in metrics_of(model):
        _bind(metric)
        if metric not in _of_global_batch and not keras_compat.is_builtin(type(metric)):
            _use_global_batch(metric, strategy)


def _use_global_batch(metric: keras.Metric, strategy: Strategy) -> None:
    """Makes all state of a metric equal on all replicas, that of metrics inside of it, too."""
    bind(metric, GlobalBatchMetric)
    _of_global_batch.add(metric)
    for variable in metric.variables:
        if variable.aggregation == "sum":
            # Not the variable's own value, which is the sum over the replicas.
            value = ops.convert_to_numpy(strategy.runner.local_results(variable)[0])
            keras_compat.change_aggregation(variable, "only_first_replica", value)


def metric_created(
    original: Callable[..., None], metric: keras.Metric, *args: object, **kwargs: object
) -> None:
    """Prepares a metric that is made in a scope; one that Keras ships adds up its state."""
    original(metric, *args, **kwargs)
    strategy = scoped_strategy()
    if strategy is not None and strategy.replica_set is not None:
        _bind(metric)


def _mixes(
    metric: keras.Metric, function: Any, arguments: dict[str, Any], y_true: Any, y_pred: Any
) -> bool:
    """Returns whether a metric's function mixes rows; a user's may if it returns a scalar.

    All replicas must find the same: of a single row, a value per example may be a scalar, too.
    """
    if keras_compat.is_builtin(function):
        return keras_compat.mixes_examples(function, arguments, y_pred)
    found = _returns_scalar.get(metric)
    if found is None:
        given: Any = (y_true, y_pred)
        if _is_one_row(y_pred):
            given = keras.tree.map_structure(lambda one: ops.concatenate([one, one]), given)
        found = _returns_scalar[metric] = ops.ndim(function(*given, **arguments)) == 0
    return found


def _is_one_row(y_pred: object) -> bool:
    return keras.tree.flatten(y_pred)[0].shape[0] == 1


def _shared(values: Any, sample_weight: Any) -> tuple[Any, Any]:
    """Returns the values and weights by which a replica updates `keras.metrics.Mean` or ``Sum``.

    A scalar, such as the loss of a batch, is a mean over the replica's own examples: it counts by
    the replica's weight, so that all replicas together add one value with weight 1.
    """
    replica = current.fit_replica
    if replica is None:
        return values, sample_weight
    weight = replica.local_batch.weight
    if ops.ndim(values) > 0:
        if not isinstance(weight, float) and _is_number_of_rows(sample_weight):
            # Keras weights an unreduced loss by its rows: the stand-in of an empty replica is none.
            sample_weight = ops.where(weight > 0, sample_weight, ops.zeros_like(sample_weight))
    else:
        if not isinstance(weight, float):
            # The mean of an empty replica is NaN, and NaN times 0 would stay NaN.
            values = ops.convert_to_tensor(values)
            values = ops.where(weight > 0, values, ops.zeros_like(values))
        sample_weight = weight if sample_weight is None else sample_weight
    return values, sample_weight


def _is_number_of_rows(sample_weight: Any) -> bool:
    return (
        keras.ops.is_tensor(sample_weight)
        and len(sample_weight.shape) == 0
        and keras.backend.is_int_dtype(sample_weight.dtype)
    )
