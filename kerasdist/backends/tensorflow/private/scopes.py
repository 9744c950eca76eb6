"""Enters and leaves the scopes of ``tf.distribute``'s strategies in a thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, final

import tensorflow as tf

from kerasdist.backends.tensorflow import internals
from kerasdist.core import context
from kerasdist.core.internals import Internal


@final
class NativeScope:
    """The scope of a ``tf.distribute`` strategy, which stays open after Keras's ``clear_session``.

    TensorFlow stores the open scope in its default graph, which ``clear_session`` drops. Without
    this class, the scope would then have no effect any more, and leaving the scope would fail.
    """

    def __init__(self, native_strategy: tf.distribute.Strategy) -> None:
        self._native_strategy = native_strategy
        self._scope: Any = None

    def __enter__(self) -> None:
        _renew_scopes_after_reset()
        self.renew()
        context.current.placements.append(self)

    def __exit__(self, *error: object) -> None:
        context.current.placements.remove(self)
        self.leave(*error)

    def leave(self, *error: object) -> None:
        """Leaves the scope."""
        self._scope.__exit__(*(error or (None, None, None)))

    def renew(self) -> None:
        """Enters the scope on the current default graph."""
        self._scope = self._native_strategy.scope()
        self._scope.__enter__()


@cache
def _renew_scopes_after_reset() -> None:
    reset = tf.compat.v1.reset_default_graph

    def reset_and_renew() -> None:
        reset()
        for scope in context.current.placements:
            scope.renew()

    tf.compat.v1.reset_default_graph = reset_and_renew


def run_without_merge_call(function: Callable[[], Any]) -> Any:
    """Runs code of Keras that would otherwise call ``merge_call`` in cross-replica context.

    Keras's optimizers update variables by `tf.__internal__.distribute.interim.maybe_merge_call`.
    That call fails in cross-replica context, and anywhere in the branches of ``ops.cond``, which is
    why gradient accumulation crashes under ``tf.distribute.MirroredStrategy``. Here the code runs
    in the cross-replica context of TensorFlow's default strategy, as if no scope were open. Keras
    then makes the update directly, and the update itself enters the scope of its variables'
    strategy.
    """

    def merged(_: object) -> Any:
        return function()

    with _without(internals.STRATEGY_STACK):
        here = tf.distribute.get_replica_context()
        return here.merge_call(tf.autograph.experimental.do_not_convert(merged))


@final
class OneCopy:
    """Stands in for a strategy in an optimizer's update, and updates one copy of each variable."""

    def __init__(self, index: int) -> None:
        self._index = index

    @property
    def extended(self) -> OneCopy:
        """This object itself, which has the method of `extended` that optimizers call."""
        return self

    def update(
        self, variable: Any, function: Callable[..., Any], args: Sequence[Any] = (), **_: object
    ) -> Any:
        """Calls the function with the copy of the variable that this object updates."""
        return function(variable.values[self._index], *args)


@contextmanager
def on_one_copy(index: int) -> Iterator[OneCopy]:
    """Makes each variable of a strategy stand for one of its copies until the block ends.

    Yields a stand-in for the strategy: an optimizer that gets the stand-in as its strategy updates
    only that copy.
    """
    with internals.UPDATE_CONTEXT.value(index):
        yield OneCopy(index)


@contextmanager
def outside_strategies() -> Iterator[None]:
    """Runs code as if no strategy's scope were open."""
    with _without(internals.CREATOR_STACK), _without(internals.STRATEGY_STACK):
        yield


@contextmanager
def _without(stack: Internal) -> Iterator[None]:
    """Makes a stack of the default graph empty for this thread, until the block ends."""
    graph = tf.compat.v1.get_default_graph()
    before = stack.of(graph)
    stack.set(graph, [])
    try:
        yield
    finally:
        stack.set(graph, before)
