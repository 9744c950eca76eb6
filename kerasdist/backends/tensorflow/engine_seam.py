"""The only file that touches private parts of TensorFlow; a test watches each of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import tensorflow as tf
from tensorflow.python.distribute import distribute_lib


@contextmanager
def cross_replica_code_without_merge_call() -> Iterator[None]:
    """Lets code that would call ``merge_call`` run in cross-replica context.

    Keras's optimizers update variables by `tf.__internal__.distribute.interim.maybe_merge_call`,
    which fails where the replicas have met already, and in the branches of ``ops.cond`` wherever it
    is called: that is why gradient accumulation crashes under ``tf.distribute.MirroredStrategy``
    (TRAPS, 9). Where no strategy is in force it calls the update directly, and that enters its
    variables' strategy by itself.
    """
    default = distribute_lib._get_default_strategy()
    distribute_lib._push_per_thread_mode(distribute_lib._ThreadMode(default, default, None))
    try:
        yield
    finally:
        distribute_lib._pop_per_thread_mode()


def private_names() -> tuple[object, ...]:
    """Returns what this file needs of TensorFlow, for the test that watches it."""
    return (
        distribute_lib._get_default_strategy,
        distribute_lib._push_per_thread_mode,
        distribute_lib._pop_per_thread_mode,
        distribute_lib._ThreadMode,
        tf.__internal__.distribute.interim.maybe_merge_call,
    )
