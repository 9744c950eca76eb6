"""Copies of native variables, on which a trial takes a training step."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import ps_values
from tensorflow.python.distribute import values as distributed_values
from tensorflow.python.eager.polymorphic_function import polymorphic_function

from kerasdist import keras_compat

# What the package's own kinds of distributed variables hold beside TensorFlow's attributes.
_OWN = ("_is_equal", "_known")


def plain_copy(variable: Any, value: tf.Tensor) -> tf.Variable:
    """Returns a plain copy of a variable, which Keras's optimizers identify with the original."""
    copy = tf.Variable(value, trainable=variable.trainable, name="copy", shape=value.shape)
    # The id by which an optimizer finds the variable's slots.
    vars(copy)["_unique_id"] = variable._unique_id
    return copy


def replicated_copy(variable: Any) -> Any:
    """Returns a copy of a strategy's variable, with the same value on each device."""
    if isinstance(variable, ps_values.AggregatingVariable):
        return type(variable)(
            variable._distribute_strategy, _copy(variable._v), variable._aggregation
        )
    if not isinstance(variable, distributed_values.DistributedVariable):
        return _copy(variable)
    parts = [_copy(one) for one in variable.values]
    copy = type(variable)(
        variable._distribute_strategy, parts, variable._aggregation, variable._policy
    )
    vars(copy).update({name: one for name, one in vars(variable).items() if name in _OWN})
    return copy


def _copy(variable: Any) -> tf.Variable:
    with tf.device(variable.device):
        return plain_copy(variable, variable.read_value())


def run_trials_eagerly() -> None:
    """Runs compiled functions eagerly in a trial: they would keep its copies of variables."""
    function: Any = polymorphic_function.Function
    known = function._run_functions_eagerly.fget

    def runs_eagerly(compiled: Any) -> bool:
        return known(compiled) or keras_compat.trial() is not None

    function._run_functions_eagerly = property(runs_eagerly)
