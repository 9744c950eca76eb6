"""The only file that touches private parts of TensorFlow; a test watches each of them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import distribute_lib


class _Open(threading.local):
    """The scopes that are open in the calling thread, the outermost first."""

    def __init__(self) -> None:
        self.scopes: list[EngineScope] = []


_open = _Open()


class EngineScope(AbstractContextManager[None]):
    """``strategy.scope()`` of a ``tf.distribute`` strategy, that outlives ``clear_session``.

    TensorFlow keeps on its default graph which strategy is in force, and Keras's ``clear_session``
    throws that graph away: the scope would be left without a word, and its end would fail.
    """

    def __init__(self, engine: tf.distribute.Strategy) -> None:
        """Prepares the scope.

        Args:
            engine: The strategy.
        """
        self._engine = engine
        self._scope: Any = None

    def __enter__(self) -> None:
        _renew_scopes_after_reset()
        self.renew()
        _open.scopes.append(self)

    def __exit__(self, *error: object) -> None:
        _open.scopes.remove(self)
        self._scope.__exit__(*error)

    def renew(self) -> None:
        """Enters the scope on the default graph that there is now."""
        self._scope = self._engine.scope()
        self._scope.__enter__()


@cache
def _renew_scopes_after_reset() -> None:
    reset = tf.compat.v1.reset_default_graph

    def reset_and_renew() -> None:
        reset()
        for scope in _open.scopes:
            scope.renew()

    tf.compat.v1.reset_default_graph = reset_and_renew


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
