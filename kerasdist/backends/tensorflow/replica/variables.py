"""Keras variables on TensorFlow: their native variables and copies, hooks on reads and writes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import keras
import tensorflow as tf

from kerasdist import keras_compat
from kerasdist.backends.base.variable_rules import is_sum_on_read, shares_of_sum
from kerasdist.backends.tensorflow.private.strategies import (
    components,
    is_distributed,
    remember_sum,
)
from kerasdist.core import ownership
from kerasdist.core.context import current
from kerasdist.errors import ScopeError
from kerasdist.training.batch_norm import keep_statistics
from kerasdist.training.metrics import metrics_of


def native(variable: object) -> Any:
    """Returns the TensorFlow variable inside of a Keras variable."""
    return variable.value if isinstance(variable, keras.Variable) else variable


def copies(variable: object) -> Sequence[Any]:
    """Returns the components that this process has of a variable or another distributed value."""
    return components(native(variable))


def averaged(variables: Iterable[keras.Variable]) -> list[keras.Variable]:
    """Returns the sync-on-read variables that are read as the mean of the replicas' values."""
    read_as_mean = (
        v for v in variables if v.synchronization == "on_read" and v.aggregation == "mean"
    )
    # Central storage has one copy for all replicas, so there is no mean.
    return [v for v in read_as_mean if isinstance(native(v), tf.distribute.DistributedValues)]


def check_mirrored(
    variables: Iterable[keras.Variable], native_strategy: tf.distribute.Strategy, owner: str
) -> None:
    """Refuses variables that were not made in the strategy's scope.

    Without this check ``tf.distribute`` would fail in the middle of a step, with a message about
    internals.
    """
    strangers = [
        variable.path
        for variable in variables
        if not native_strategy.extended.variable_created_in_scope(native(variable))
    ]
    if strangers:
        raise ScopeError(
            f"Expected {owner} to be made inside of the scope of the model's strategy, so that "
            f"every device has a copy of its variables. Received: variables={strangers[:5]}, made "
            "outside of it. Make the model, its optimizer and its metrics in "
            "`with strategy.scope():`, or pass the optimizer and the metrics by name."
        )


_Listener = Callable[[keras.Variable], None]

# The listeners to this thread's reads of Keras variables.
_listeners: ContextVar[tuple[_Listener, ...]] = ContextVar("listeners", default=())


@contextmanager
def reads_preceded(listener: _Listener) -> Iterator[None]:
    """Inside of the block, calls `listener` before each read of a Keras variable by this thread."""
    token = _listeners.set((*_listeners.get(), listener))
    try:
        yield
    finally:
        _listeners.reset(token)


def install() -> None:
    """Makes Keras call the hooks of this module when it reads, assigns or stores a variable."""
    keras_compat.install(read=_tell_listeners, assign=_assign, store=_store)


def _assign(original: Callable[..., Any], variable: keras.Variable, value: object) -> Any:
    """In replica code, lets the replica's collectives combine the values that replicas assign."""
    replica = current.replica
    if replica is None or keras_compat.get_stateless_scope() is not None:
        return original(variable, value)
    ownership.require_own(variable)
    value = keras_compat.ops.convert_to_tensor(value, dtype=variable.dtype)
    replica.collectives.assign(variable, value, original)
    return value


def _tell_listeners(original: Callable[[Any], Any], variable: Any) -> Any:
    for listener in _listeners.get():
        listener(variable)
    return original(variable)


def _store(original: Callable[..., Any], variable: keras.Variable, value: Any) -> Any:
    """Makes an integer variable that is read as a sum return the value assigned to it.

    TensorFlow would divide the value by the number of replicas, round it down, and assign the
    result to each replica. With two replicas a confusion matrix of ones would then be read as
    zeros. With this hook the first replica also gets the remainder.
    """
    in_scope = keras_compat.get_stateless_scope() is not None
    if in_scope or current.replica is not None or not is_sum_on_read(variable):
        return original(variable, value)
    own = keras_compat.stored_value(variable)
    if not (isinstance(own, tf.distribute.DistributedValues) and own.dtype.is_integer):
        return original(variable, value)
    native_strategy: tf.distribute.Strategy = own.distribute_strategy
    total = tf.cast(value, variable.dtype)
    first_share, share = shares_of_sum(total, native_strategy.num_replicas_in_sync)
    for number, part in enumerate(copies(variable)):
        is_first = number == 0 and native_strategy.extended.should_checkpoint
        part.assign(first_share if is_first else share)
    remember_sum(own, total)
    return total


def is_foreign(variable: keras.Variable, native_strategy: tf.distribute.Strategy) -> bool:
    """Returns whether a Keras variable was made outside of every scope, with a single copy."""
    if not isinstance(variable, keras.Variable):
        return False
    held = keras_compat.stored_value(variable)
    return not (
        held is None
        or is_distributed(held)
        or native_strategy.extended.variable_created_in_scope(held)
    )


def adopt_all(variables: Iterable[keras.Variable], native_strategy: tf.distribute.Strategy) -> bool:
    """Recreates variables for which `is_foreign` is true, with their values, on every device.

    Returns whether any variable was recreated. Functions compiled earlier still hold the old
    variables.
    """
    recreated = False
    for variable in variables:
        if not is_foreign(variable, native_strategy):
            continue
        recreated = True
        value = keras_compat.stored_value(variable).numpy()
        keras_compat.reinitialize(variable)
        if is_sum_on_read(variable):
            variable.assign(value)  # gives each component its share, because a read adds them up
    return recreated


def adopt(
    optimizer: keras.Optimizer,
    native_strategy: tf.distribute.Strategy,
    variables: Iterable[keras.Variable] = (),
    *,
    recreated: bool = False,
) -> None:
    """Moves an optimizer that was made outside of the scope into the scope, with its state."""
    recreated |= adopt_all(variables, native_strategy)
    optimizers = with_inner(optimizer)
    for one in optimizers:
        recreated |= adopt_all(one.variables, native_strategy)
        keras_compat.move_optimizer(one, native_strategy)
    if recreated:
        for one in optimizers:
            keras_compat.index_variables(one)


def with_inner(optimizer: keras.Optimizer) -> list[Any]:
    """Returns an optimizer and, for a LossScaleOptimizer, also its inner optimizer."""
    if isinstance(optimizer, keras_compat.LossScaleOptimizer):
        return [optimizer, optimizer.inner_optimizer]
    return [optimizer]


def take_on(model: Any, replicas: Any) -> None:
    """Gives each device a copy of a model's variables that were made outside of the scope.

    If a variable is recreated, the compiled functions of the model, and of models among its layers,
    are dropped, because they hold the old variable.
    """
    recreated = False
    native_strategy: tf.distribute.Strategy = replicas.group.native_strategy
    with native_strategy.scope():
        for layer in keras_compat.flat_layers(model):
            if isinstance(layer, keras.layers.BatchNormalization) and layer.built:
                keep_statistics(layer, replicas.options.batch_norm)
            if adopt_all(layer.variables, native_strategy):
                recreated = True
                if isinstance(layer, keras.Model):
                    keras_compat.drop_compiled(layer)
        for metric in metrics_of(model):
            recreated |= adopt_all(metric.variables, native_strategy)
        if model.compiled and model.optimizer is not None:
            adopt(model.optimizer, native_strategy, recreated=recreated)
    if recreated:
        keras_compat.drop_compiled(model)
