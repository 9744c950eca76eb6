"""Starting code in every replica, and telling what went wrong there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from kerasdist import keras_seam
from kerasdist.backends.tensorflow.engine_seam import error_with_own_type
from kerasdist.backends.tensorflow.groups import Group
from kerasdist.errors import ReplicaError

# What TensorFlow says, and what it means.
_MISFITS = {
    "made a different number of replica_context().merge_call() calls": (
        "Expected the same collectives and assignments in every replica, and as many. Received: "
        "replicas of which some ended while others waited for them. Call them in the same order in "
        "all replicas, never under a condition that differs."
    ),
    "`merge_call` called while defining a new graph": (
        "Expected collectives, optimizer.apply and assignments that are combined directly in the "
        "function that strategy.run runs. Received: a call in a compiled function, a loop or a "
        "branch inside of it, where replicas cannot meet. Compile the function itself, or the "
        "function around strategy.run, and move the call out of loops and branches on tensors."
    ),
}


def in_replicas(
    group: Group,
    code: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> list[Any]:
    """Calls ``code(replica, *args, **kwargs)`` once a replica, in a graph or eagerly.

    Args:
        group: The replicas, and the engine that runs those of this process.
        code: What to do; AutoGraph leaves it as it is.
        args: Arguments; of the framework's distributed values each replica gets its component.
        kwargs: Keyword arguments, likewise.

    Returns:
        What it returned in each replica of this process.

    Raises:
        ReplicaError: If the replicas do not all meet.
    """
    engine, first = group.engine, group.local.start
    results: list[Any] = [None] * len(group.local)
    thread_state = keras_seam.copy_thread_state()
    # A value that is another Python integer in each replica.
    ids = engine.experimental_distribute_values_from_function(
        lambda replica: replica.replica_id_in_sync_group
    )

    def replica_code(replica: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        # tf.distribute starts a thread for each replica, in which Keras remembers nothing.
        keras_seam.paste_thread_state(thread_state)
        results[replica - first] = code(replica, *args, **kwargs)

    try:
        engine.run(
            tf.autograph.experimental.do_not_convert(replica_code),
            args=(ids, tuple(args), dict(kwargs or {})),
        )
    except RuntimeError as error:
        for sign, meaning in _MISFITS.items():
            if sign in str(error):
                raise ReplicaError(meaning) from error
        raise
    except Exception as error:
        own = error_with_own_type(error)
        if own is error:
            raise
        raise own from own.__cause__
    return results
