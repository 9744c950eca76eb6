"""Variables that were made outside of the scope get a copy on every device."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import keras
import tensorflow as tf

from kerasdist import keras_seam
from kerasdist.backends.tensorflow.engine_seam import is_distributed
from kerasdist.backends.tensorflow.variables import native
from kerasdist.training.batch_norm import keep_statistics
from kerasdist.training.metrics import metrics_of


def mirror(variable: Any, engine: tf.distribute.Strategy) -> bool:
    """Gives a Keras variable that no strategy made a copy on every device, with its value.

    Args:
        variable: A Keras variable; the framework's own are left as they are.
        engine: The strategy, whose scope is open.

    Returns:
        Whether the variable has been recreated: functions that were compiled before hold the old.
    """
    if not is_foreign(variable, engine):
        return False
    value = keras_seam.stored_value(variable).numpy()
    keras_seam.make_anew(variable)
    parts = engine.experimental_local_results(native(variable))
    if variable.synchronization == "on_read" and variable.aggregation == "sum":
        # What is read is the sum of the parts.
        for part in parts[1:]:
            part.assign(tf.zeros_like(part))
        parts[0].assign(value if engine.extended.should_checkpoint else tf.zeros_like(parts[0]))
    return True


def is_foreign(variable: Any, engine: tf.distribute.Strategy) -> bool:
    """Returns whether no strategy has made a Keras variable: it has one copy, on one device.

    Args:
        variable: A Keras variable, or the framework's own, which is left as it is.
        engine: The strategy in force.
    """
    if not isinstance(variable, keras.Variable):
        return False
    held = keras_seam.stored_value(variable)
    return not (
        held is None or is_distributed(held) or engine.extended.variable_created_in_scope(held)
    )


def adopt_all(variables: Iterable[Any], engine: tf.distribute.Strategy) -> bool:
    """Gives variables copies, see `mirror`; returns whether one has been recreated.

    Args:
        variables: Keras variables.
        engine: The strategy, whose scope is open.
    """
    recreated = [mirror(variable, engine) for variable in variables]
    return any(recreated)


def adopt_layers(
    layers: Iterable[Any], engine: tf.distribute.Strategy, batch_norm: str | None
) -> bool:
    """Gives the variables of layers copies, see `mirror`; returns whether one has been recreated.

    Functions that the layers among them that are models have compiled are dropped: they hold the
    old variables.

    Args:
        layers: Keras layers.
        engine: The strategy, whose scope is open.
        batch_norm: How the strategy wants moving statistics kept.
    """
    recreated = False
    for layer in layers:
        if isinstance(layer, keras.layers.BatchNormalization) and layer.built:
            keep_statistics(layer, batch_norm, partial(is_foreign, engine=engine))
        if adopt_all(layer.variables, engine):
            recreated = True
            if isinstance(layer, keras.Model):
                keras_seam.drop_compiled(layer)
    return recreated


def adopt(
    optimizer: Any,
    engine: tf.distribute.Strategy,
    variables: Iterable[Any] = (),
    *,
    recreated: bool = False,
) -> None:
    """Lets an optimizer that was made outside of the scope belong to it, with its state.

    Args:
        optimizer: A Keras optimizer.
        engine: The strategy, whose scope is open.
        variables: Those that it updates, which get copies too.
        recreated: Whether some of them have just been recreated.
    """
    recreated |= adopt_all(variables, engine)
    optimizers = [optimizer]
    if isinstance(optimizer, keras_seam.LossScaleOptimizer):
        optimizers.append(optimizer.inner_optimizer)
    for one in optimizers:
        recreated |= adopt_all(one.variables, engine)
        if not keras_seam.belongs_to(one, engine):
            keras_seam.adopt_optimizer(one, engine)
    if recreated:
        for one in optimizers:
            keras_seam.index_variables(one)


def take_on(model: Any, engine: tf.distribute.Strategy, batch_norm: str | None) -> None:
    """Gives what a model has from outside of the scope copies: layers, metrics, the optimizer.

    Args:
        model: A Keras model.
        engine: The strategy.
        batch_norm: How it wants moving statistics kept.
    """
    with engine.scope():
        recreated = adopt_layers(keras_seam.flat_layers(model), engine, batch_norm)
        for metric in metrics_of(model):
            recreated |= adopt_all(metric.variables, engine)
        if model.compiled and model.optimizer is not None:
            adopt(model.optimizer, engine, recreated=recreated)
    if recreated:
        keras_seam.drop_compiled(model)
