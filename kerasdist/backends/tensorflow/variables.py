"""Whether a model's variables have a copy on every device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf

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


def averaged(variables: Iterable[Any]) -> list[Any]:
    """Returns those variables of which each replica has a part, and that are read as the mean.

    Args:
        variables: Keras variables.
    """
    read_as_mean = (
        v for v in variables if v.synchronization == "on_read" and v.aggregation == "mean"
    )
    # Central storage has one copy for all replicas.
    return [v for v in read_as_mean if isinstance(native(v), tf.distribute.DistributedValues)]


def statistics_of(layers: Iterable[Any]) -> list[Any]:
    """Returns the moving statistics of those layers that normalise by the global batch in `fit`.

    Args:
        layers: Keras layers; those that are not built yet have none.
    """
    norms = (
        one for one in layers if isinstance(one, keras.layers.BatchNormalization) and one.built
    )
    return averaged(v for norm in norms for v in (norm.moving_mean, norm.moving_variance))


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
