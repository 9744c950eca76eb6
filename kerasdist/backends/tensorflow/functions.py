"""``kd.function`` and ``kd.value_and_grad``: ``tf.function`` and ``tf.GradientTape``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from kerasdist.backends.tensorflow import reads
from kerasdist.backends.tensorflow.engine_seam import explained
from kerasdist.backends.tensorflow.variables import native


def function(compiled: Callable[..., Any], jit_compile: bool) -> Callable[..., Any]:
    """Returns a ``tf.function``, whose calls say which worker is lost if one is.

    Args:
        compiled: What to compile.
        jit_compile: Whether to do it with XLA.
    """
    # A ragged last batch makes a second graph, a third size of batch none.
    return explained(tf.function(compiled, jit_compile=jit_compile or None, reduce_retracing=True))


def value_and_grad(
    function: Callable[[], Any], variables: Sequence[Any], has_aux: bool
) -> tuple[Any, list[Any]]:
    """Calls a function under a gradient tape.

    Args:
        function: Takes nothing; returns a scalar, or with `has_aux` a pair of it and anything.
        variables: Keras variables, or the framework's.
        has_aux: Whether the function returns a pair.

    Returns:
        What it returned, and a gradient for each variable, None for one that it did not read.

    Raises:
        ValueError: If the value is no scalar.
    """
    sources = [_component(variable) for variable in variables]
    with reads.noted() as read, tf.GradientTape() as tape:
        tape.watch([source for source in sources if not source.trainable])
        result = function()
        value = tf.convert_to_tensor(result[0] if has_aux else result)
        if value.shape.rank not in (0, None):
            raise ValueError(
                "Expected a function that returns a scalar. Received: a value of shape "
                f"{tuple(value.shape)}. Take its mean or sum, or return what else you need as the "
                "second of a pair, with has_aux=True."
            )
    # The tape knows of what compiled functions read that were called again.
    seen = {id(one.handle) for one in tape.watched_variables() if one.trainable}
    return result, [
        _zeros(source)
        if gradient is None and (id(variable) in read or id(source.handle) in seen)
        else gradient
        for variable, source, gradient in zip(
            variables, sources, tape.gradient(value, sources), strict=True
        )
    ]


def _component(variable: Any) -> Any:
    """The copy of a variable that is read here."""
    variable = native(variable)
    if not isinstance(variable, tf.distribute.DistributedValues):
        return variable
    replica = tf.distribute.get_replica_context()
    if replica is None:  # in cross-replica code the first copy is read
        return variable.values[0]
    # In a graph the number is a constant. Each worker has as many replicas, counted through.
    number = tf.get_static_value(replica.replica_id_in_sync_group)
    return variable.values[number % len(variable.values)]


def _zeros(variable: Any) -> Any:
    return tf.zeros(variable.shape, variable.dtype)
