"""Which strategy is in force here, and which replica this code belongs to.

Both are facts of the calling thread, as in ``tf.distribute``: a scope entered in one thread is not
seen by another. Outside every scope there is a default strategy of one replica.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kerasdist.errors import ScopeError

if TYPE_CHECKING:
    from kerasdist.replica_context import ReplicaContext
    from kerasdist.strategy import Strategy


class _Here(threading.local):
    """What the calling thread is inside of."""

    def __init__(self) -> None:
        self.scopes: list[Strategy] = []
        self.replicas: list[ReplicaContext | None] = []


_here = _Here()
_default: list[Strategy] = []

# Named, not imported: the strategies stand above this file.
_DEFAULT_HOME = "kerasdist.strategies.default"


def default_strategy() -> Strategy:
    """Returns the strategy that is in force outside every scope."""
    if not _default:
        _default.append(importlib.import_module(_DEFAULT_HOME).DefaultStrategy())
    return _default[0]


@contextmanager
def strategy_scope(strategy: Strategy) -> Generator[None]:
    """Makes `strategy` the one in force, in this thread.

    Args:
        strategy: The strategy.

    Raises:
        ScopeError: If another strategy's scope is open in this thread, or this is replica code.
    """
    inside = replica()
    if inside is not None:
        raise ScopeError(
            "Expected strategy.scope() in cross-replica code. Received: a call from inside replica "
            f"{inside.replica_id_in_sync_group} of {inside.strategy}. Enter the scope outside of "
            "the step."
        )
    if _here.scopes and _here.scopes[-1] is not strategy:
        raise ScopeError(
            "Expected one strategy at a time. Received: the scope of "
            f"{strategy} inside the scope of {_here.scopes[-1]}. Leave the first scope before you "
            "enter another strategy's."
        )
    _here.scopes.append(strategy)
    try:
        yield
    finally:
        _here.scopes.pop()


@contextmanager
def replica_scope(context: ReplicaContext | None) -> Generator[None]:
    """Says that the code inside belongs to one replica, or, with None, to all of them together.

    Args:
        context: The replica's context, or None for cross-replica code called from replica code.
    """
    _here.replicas.append(context)
    try:
        yield
    finally:
        _here.replicas.pop()


def replica() -> ReplicaContext | None:
    """Returns the replica whose code this is, None for all other code; the default is left out."""
    return _here.replicas[-1] if _here.replicas else None


def enclosing_replica() -> ReplicaContext | None:
    """Returns the replica that called this code, also where it is the function of a merge call."""
    for context in reversed(_here.replicas):
        if context is not None:
            return context
    return None


def scoped_strategy() -> Strategy | None:
    """Returns the strategy whose scope or replica code this is, None outside both."""
    inside = enclosing_replica() if _here.replicas else None
    if inside is not None:
        return inside.strategy
    return _here.scopes[-1] if _here.scopes else None


def get_strategy() -> Strategy:
    """Returns the strategy in force.

    Returns:
        The strategy whose scope is open in this thread, or whose replica code this is; outside both
        the default strategy, which has one replica.
    """
    return scoped_strategy() or default_strategy()


def has_strategy() -> bool:
    """Returns whether a strategy other than the default one is in force."""
    strategy = scoped_strategy()
    return strategy is not None and strategy is not default_strategy()


def get_replica_context() -> ReplicaContext | None:
    """Returns the context of the replica whose code this is.

    Returns:
        The `ReplicaContext`; that of the default strategy outside every scope; None in
        cross-replica code, that is inside ``with strategy.scope():``.
    """
    if _here.replicas:
        return _here.replicas[-1]
    if _here.scopes and _here.scopes[-1] is not default_strategy():
        return None
    return default_strategy().sole_replica_context()


def in_cross_replica_context() -> bool:
    """Returns whether this is code for all replicas together, as in ``with strategy.scope():``."""
    return get_replica_context() is None
