"""Runs code once per replica; at a collective all replicas wait while one thread computes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from kerasdist import keras_compat
from kerasdist.api.replica_context import ReplicaContext
from kerasdist.backends.tensorflow.fit.batches import LocalRows
from kerasdist.backends.tensorflow.private.compiled import error_with_own_type
from kerasdist.backends.tensorflow.private.lookups import Lookups
from kerasdist.backends.tensorflow.private.strategies import per_replica
from kerasdist.backends.tensorflow.replica.collectives import TensorFlowCollectives
from kerasdist.backends.tensorflow.replica.variables import reads_preceded
from kerasdist.backends.tensorflow.workers.group import Group
from kerasdist.core import context
from kerasdist.errors import ReplicaError

if TYPE_CHECKING:
    from kerasdist.core.context import StrategyLike

# Parts of TensorFlow's error messages, and what kerasdist's errors say in their place.
_MISFITS = {
    "made a different number of replica_context().merge_call() calls": (
        "Expected the same collectives and assignments in every replica, and as many. Received: "
        "replicas of which some ended while others waited for them. Call them in the same order in "
        "all replicas, never under a condition that differs."
    ),
    "`merge_call` called while defining a new graph": (
        "Expected collectives, optimizer.apply, assignments that are combined, and in fit a "
        "metric's result directly in the step, or in the function that strategy.run runs. "
        "Received: a call in a compiled function, a loop or a branch inside of it, where replicas "
        "cannot meet. Take tf.function off functions that a step calls: fit compiles the whole "
        "step. In a custom loop compile the function itself, or the function around strategy.run. "
        "Move the call out of loops and branches on tensors."
    ),
}


def in_replicas(
    strategy: StrategyLike,
    group: Group,
    code: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    local_rows: Sequence[LocalRows] | None = None,
    waits: bool = False,
) -> list[Any]:
    """Calls ``code(index, *args, **kwargs)`` once per replica of this process, from index 0.

    Each call runs in its replica's context, in a graph or eagerly; in `fit` with its replica's
    local batch of the batch. Returns one result per replica.
    """
    native_strategy, first = group.native_strategy, group.local.start
    results: list[Any] = [None] * len(group.local)
    thread_state, trial = keras_compat.copy_thread_state(), keras_compat.trial()

    def replica_code(replica: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        # tf.distribute starts a thread per replica, in which Keras's thread-local state is empty.
        keras_compat.paste_thread_state(thread_state)
        index = replica - first
        local = None if local_rows is None else local_rows[index]
        local_batch, replicas = local and local.local_batch, native_strategy.num_replicas_in_sync
        lookups = local and Lookups(local.data, local.local_batch.total, replicas)
        collectives = TensorFlowCollectives(group, replica, local_batch, lookups, waits=waits)
        here = ReplicaContext(
            strategy=strategy,
            replica_id_in_sync_group=replica,
            num_replicas_in_sync=replicas,
            collectives=collectives,
            local_batch=local_batch,
        )
        recorded = lookups.recorded() if lookups else nullcontext()
        with (
            keras_compat.in_trial(trial),
            context.replica_scope(here),
            reads_preceded(collectives.before_read),
            recorded,
        ):
            results[index] = code(index, *args, **kwargs)

    try:
        native_strategy.run(
            tf.autograph.experimental.do_not_convert(replica_code),
            args=(per_replica(group.local), tuple(args), dict(kwargs or {})),
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
