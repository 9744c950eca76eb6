"""Whether a model's variables have a copy on every device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf

from kerasdist import keras_seam
from kerasdist.errors import ScopeError


def native(variable: Any) -> Any:
    """Returns the framework's variable in a Keras variable.

    Args:
        variable: A Keras variable, or the framework's own.
    """
    return variable.value if isinstance(variable, keras.Variable) else variable


def gradient_replaces(variable: Any) -> bool:
    """Returns whether the "gradient" of a variable is its next value, as with float8 scales.

    Args:
        variable: A Keras variable, or the framework's own.
    """
    return isinstance(variable, keras.Variable) and variable.overwrite_with_gradient


def adopt(optimizer: Any, engine: tf.distribute.Strategy) -> None:
    """Lets an optimizer that was made outside of the scope belong to it, if it has no state yet.

    Args:
        optimizer: A Keras optimizer.
        engine: The strategy.
    """
    optimizers = [optimizer]
    if isinstance(optimizer, keras_seam.LossScaleOptimizer):
        optimizers.append(optimizer.inner_optimizer)
    for one in optimizers:
        if not one.built and not _are_mirrored(one.variables, engine):
            with engine.scope():
                keras_seam.adopt_optimizer(one, engine)


def adopt_metric(metric: Any, engine: tf.distribute.Strategy) -> None:
    """Lets a metric that was made outside of the scope belong to it.

    Args:
        metric: A Keras metric, before the first step of its model is compiled.
        engine: The strategy.
    """
    if not _are_mirrored(metric.variables, engine):
        with engine.scope():
            for variable in metric.variables:
                keras_seam.make_anew(variable)


def _are_mirrored(variables: Iterable[Any], engine: tf.distribute.Strategy) -> bool:
    return all(engine.extended.variable_created_in_scope(native(v)) for v in variables)


def check_mirrored(variables: Iterable[Any], engine: tf.distribute.Strategy, owner: str) -> None:
    """Refuses variables that were not made in the strategy's scope.

    ``tf.distribute`` would fail on them in the middle of a step, with a message about internals.

    Args:
        variables: Keras variables.
        engine: The strategy that must have made them.
        owner: What they belong to, for the message.

    Raises:
        ScopeError: If one of them has no copy on each of the strategy's devices.
    """
    strangers = [
        variable.path
        for variable in variables
        if not engine.extended.variable_created_in_scope(native(variable))
    ]
    if strangers:
        raise ScopeError(
            f"Expected {owner} to be made inside of the scope of the model's strategy, so that "
            f"every device has a copy of its variables. Received: variables={strangers[:5]}, made "
            "outside of it. Make the model, its optimizer and its metrics in "
            "`with strategy.scope():`, or pass the optimizer and the metrics by name."
        )
