"""Metrics on replicas: states of Keras's metrics are summed; other metrics get the global batch.

In a step of `fit`, a metric returns its result over all replicas. So every value that a step
computes from metrics, and reports in its logs, is the same as on one device.

The state of a metric that Keras ships is a sum over examples. So each replica updates its own state
with its own rows, and a read adds the states of all replicas. A few of Keras's metrics compute a
function that mixes examples. `ReplicatedWrapper` calls such a function with the rows of all
replicas, and the state of such a metric is a sum over batches.

The state of any other metric may be something else, such as a maximum or a set. If such a metric
belongs to a model that `fit` trains, each replica updates it with the gathered rows of the global
batch. In custom loops such a metric works as in ``tf.distribute``: each replica updates its own
state, and a read adds the states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import keras

from kerasdist import keras_compat
from kerasdist.backends.base.model_trainer import trainer_of
from kerasdist.core.context import ReplicaLike, current, replica_scope, scoped_strategy, whole_step
from kerasdist.keras_compat import internals, ops
from kerasdist.training import layer_losses, numerics, randomness
from kerasdist.training.binding import bind

if TYPE_CHECKING:
    from kerasdist.api.strategy import Strategy

# For each ``MeanMetricWrapper`` with a user's function: whether this function returns a scalar, and
# not one value per example.
_returns_scalar: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()


class ReplicatedMetric:
    """A mixin for any metric: in a step of `fit`, `result` covers the rows of all replicas."""

    def result(self) -> Any:
        """Returns the result over all replicas. All replicas must call this method."""
        replica = current.fit_replica
        if replica is None:
            return super().result()  # type: ignore[misc]
        with summed(replica, [self]):
            return super().result()  # type: ignore[misc]

    def reset_state(self) -> None:
        """Resets the state on all replicas, even on replicas without rows."""
        replica = current.fit_replica
        with nullcontext() if replica is None else replica.collectives.equal_writes():
            super().reset_state()  # type: ignore[misc]


class ReplicatedMean(keras.metrics.Mean):
    """A `Mean` in which a scalar gets the replica's share of the global batch as its weight."""

    def update_state(self, values: Any, sample_weight: Any = None) -> Any:
        """Updates the state with one value per row, or with a scalar: the mean over the rows."""
        return super().update_state(*_shared(values, sample_weight))


class ReplicatedSum(keras.metrics.Sum):
    """A `Sum` in which a scalar gets the replica's share of the global batch as its weight."""

    def update_state(self, values: Any, sample_weight: Any = None) -> Any:
        """Updates the state with one value per row, or with a scalar: the mean over the rows."""
        return super().update_state(*_shared(values, sample_weight))


class ReplicatedWrapper(keras.metrics.MeanMetricWrapper):
    """A `MeanMetricWrapper` whose function gets the global batch if it mixes examples."""

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        """Updates the state with the values of the metric's function.

        A function that returns one value per example gets the replica's own rows. A function that
        may mix examples gets the rows of all replicas, so all replicas must call this method. The
        first call of a user's function shows whether it returns one value per example.
        """
        replica = current.fit_replica
        if replica is None:
            return super().update_state(y_true, y_pred, sample_weight)
        function, arguments = (
            internals.METRIC_FUNCTION.of(self),
            internals.FUNCTION_ARGUMENTS.of(self),
        )
        if _mixes(self, function, arguments, y_true, y_pred):
            rows = numerics.gather_rows(replica, (y_true, y_pred, sample_weight))
            if replica.replica_id_in_sync_group:
                return None  # only the first replica adds the value, for all replicas
            with replica_scope(None):
                return super().update_state(*rows)
        is_bare = sample_weight is None and _is_one_row(y_pred)
        if is_bare and keras_compat.get_keras_mask(y_pred) is None:
            # For a single row, a user's function may return a scalar. With a weight for the row,
            # `Mean` takes the scalar as the value of the row.
            sample_weight = None if keras_compat.is_builtin(function) else ops.ones((1,))
        return super().update_state(y_true, y_pred, sample_weight)


_KINDS = (ReplicatedWrapper, ReplicatedMean, ReplicatedSum)


def _bind(metric: keras.Metric) -> None:
    """Lets replicas update a metric with their own rows, and get its result over all replicas."""
    behind = [one for one in _KINDS if isinstance(metric, one.__bases__)]
    if ReplicatedWrapper in behind and keras_compat.is_of_examples(metric):
        # This metric of Keras has a function that returns one value per example.
        behind.remove(ReplicatedWrapper)
    bind(metric, ReplicatedMetric, *behind)


class KnownValues(keras_compat.InnerScope):
    """A scope in which reads of some variables return given values.

    Reads of other variables, and all assignments, go to the scope around this one.
    """

    def __init__(self, values: Iterable[tuple[Any, Any]]) -> None:
        super().__init__(values, initialize_variables=False)
        self.own = frozenset(self.state_mapping)

    def get_current_value(self, variable: keras.Variable) -> Any:
        """Returns a variable's given value, or else its value in the scope around this one."""
        if id(variable) in self.own or self.original_scope is None:
            return super().get_current_value(variable)
        return self.original_scope.get_current_value(variable)


@contextmanager
def summed(replica: ReplicaLike, metrics: Iterable[Any]) -> Iterator[None]:
    """In this context, a replica's reads of the metrics' states return sums over all replicas.

    All replicas must call this function. Nested calls do not sum the same variable again.
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
    """A mixin for a metric whose state may not be a sum: the global batch updates the metric."""

    def update_state(self, *args: object, **kwargs: object) -> Any:
        """Updates the state with all replicas' rows. All replicas must call this method."""
        replica = current.replica
        if replica is None or replica.num_replicas_in_sync == 1:
            return super().update_state(*args, **kwargs)  # type: ignore[misc]
        args, kwargs = numerics.gather_rows(replica, (args, kwargs))
        # These rows are the global batch, so inner metrics must not gather or weight them.
        with replica_scope(None), whole_step(replica.strategy):
            return super().update_state(*args, **kwargs)  # type: ignore[misc]

    def add_variable(self, *args: object, **kwargs: object) -> Any:
        """Makes a state variable whose value is read from replica 0.

        All replicas update the variable with the same rows, so their values are equal and must not
        be added.
        """
        kwargs["aggregation"] = "only_first_replica"
        return super().add_variable(*args, **kwargs)  # type: ignore[misc]


def metrics_of(model: Any) -> Iterator[Any]:
    """Yields the metrics of a model and its layers, and each metric given to `compile`."""
    for metric in keras_compat.attached_metrics(model):
        if not keras_compat.is_compile_metrics(metric):
            yield metric
        elif metric.built:
            yield from metric.metrics
        else:
            # The trainer is None if only the layers of the model belong to a strategy.
            trainer = trainer_of(model)
            given = [] if trainer is None else trainer.given_metrics
            yield from (one for one in given if isinstance(one, keras.metrics.Metric))


def prepare(model: Any, strategy: Strategy) -> None:
    """Prepares a model's metrics and activity regularizers for `fit`.

    This includes metrics and regularizers that were made outside of the scope.

    Raises an error if the model draws random numbers, and this version of Keras lacks what replicas
    need to draw them.
    """
    randomness.require_draws(model)
    layer_losses.prepare(model)
    for metric in metrics_of(model):
        _bind(metric)
        is_bound = isinstance(metric, GlobalBatchMetric)
        if not is_bound and not keras_compat.is_builtin(type(metric)):
            _use_global_batch(metric, strategy)


def _use_global_batch(metric: keras.Metric, strategy: Strategy) -> None:
    """Makes `fit` update a metric with the global batch, so that all replicas have equal states."""
    bind(metric, GlobalBatchMetric)
    for variable in metric.variables:
        if variable.aggregation == "sum":
            # A read of the variable itself would return the sum over the replicas.
            value = ops.convert_to_numpy(strategy.runner.local_results(variable)[0])
            keras_compat.change_aggregation(variable, "only_first_replica", value)


def metric_created(
    original: Callable[..., None], metric: keras.Metric, *args: object, **kwargs: object
) -> None:
    """Prepares a metric that is made in a scope, so that its state adds up over the replicas."""
    original(metric, *args, **kwargs)
    strategy = scoped_strategy()
    if strategy is not None and strategy.replica_set is not None:
        _bind(metric)


def _mixes(
    metric: keras.Metric, function: Any, arguments: dict[str, Any], y_true: Any, y_pred: Any
) -> bool:
    """Returns whether a metric's function may mix rows.

    A user's function may mix rows if it returns a scalar. All replicas must come to the same
    answer. With a single row any function may return a scalar, so in this case the function is
    called with the row twice.
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
    """Returns the values and sample weights by which a replica updates Keras's ``Mean`` or ``Sum``.

    A scalar, such as the loss of a batch, is a mean over the replica's own examples. The sample
    weight of such a scalar is the replica's fraction of the batch, so that all replicas together
    add one value with weight 1.
    """
    replica = current.fit_replica
    if replica is None:
        return values, sample_weight
    weight = replica.local_batch.weight
    if ops.ndim(values) > 0:
        if not isinstance(weight, float) and _is_number_of_rows(sample_weight):
            # Keras weights an unreduced loss by its number of rows. An empty replica has one
            # stand-in row, which must not count.
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
