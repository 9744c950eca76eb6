"""``kd.function`` and ``kd.value_and_grad``: ``tf.function`` and ``tf.GradientTape``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from kerasdist.backends.tensorflow.private.compiled import explained
from kerasdist.backends.tensorflow.replica.variables import copies, reads_preceded


def function(compiled: Callable[..., Any], jit_compile: bool) -> Callable[..., Any]:
    """Returns a ``tf.function`` whose errors name the lost worker, if one is lost."""
    # With `reduce_retracing`, a second batch size causes a second trace, further sizes none.
    return explained(tf.function(compiled, jit_compile=jit_compile or None, reduce_retracing=True))


def value_and_grad(
    function: Callable[[], Any], variables: Sequence[Any], has_aux: bool
) -> tuple[Any, list[Any]]:
    """Calls a function under a gradient tape.

    Returns its result, and one gradient per variable, None for a variable that it did not read.
    """
    sources = [_component(variable) for variable in variables]
    # The tape alone misses variables that are read under ``ops.stop_gradient``.
    read: set[int] = set()
    with reads_preceded(lambda variable: read.add(id(variable))), tf.GradientTape() as tape:
        tape.watch([source for source in sources if not source.trainable])
        result = function()
        value = tf.convert_to_tensor(result[0] if has_aux else result)
        if value.shape.rank not in (0, None):
            raise ValueError(
                "Expected a function that returns a scalar. Received: a value of shape "
                f"{tuple(value.shape)}. Take its mean or sum, or return what else you need as the "
                "second of a pair, with has_aux=True."
            )
    # Calls of a traced function do not call the listener, but the tape records what it reads.
    seen = {id(one.handle) for one in tape.watched_variables() if one.trainable}
    return result, [
        tf.zeros(source.shape, source.dtype)
        if gradient is None and (id(variable) in read or id(source.handle) in seen)
        else gradient
        for variable, source, gradient in zip(
            variables, sources, tape.gradient(value, sources), strict=True
        )
    ]


def _component(variable: Any) -> Any:
    """Returns the copy of a variable that the calling replica reads."""
    held = copies(variable)
    replica = tf.distribute.get_replica_context()
    if replica is None or len(held) == 1:  # in cross-replica code the first copy is read
        return held[0]
    # In a graph the replica's number is a constant. All workers have equally many replicas.
    return held[tf.get_static_value(replica.replica_id_in_sync_group) % len(held)]
