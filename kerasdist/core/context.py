"""The strategy in force, and the replica that the running code belongs to.

Both belong to the calling thread, as in ``tf.distribute``: a scope entered in one thread is not
seen by another. Outside every scope there is a default strategy of one replica.

The layers below `kerasdist.api` know a strategy and a replica's context by two protocols: the
classes import those layers.
"""

from __future__ import annotations

import abc
import importlib
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Protocol

from kerasdist.errors import ScopeError


class StrategyLike(Protocol):
    """A `kerasdist.Strategy`, by what it can be asked."""

    is_used: bool

    @property
    def num_replicas_in_sync(self) -> int:
        """How many replicas gradients are combined over."""
        ...

    @property
    def local_replicas(self) -> range:
        """The numbers of the replicas in this process."""
        ...

    @property
    def replica_set(self) -> Any:
        """The `ReplicaSet`; None for the default strategy."""
        ...

    @property
    def options(self) -> Any:
        """The `ReplicaOptions`."""
        ...

    @property
    def runner(self) -> Any:
        """The `Runner`."""
        ...

    @property
    def sole_replica_context(self) -> Any:
        """The `ReplicaContext` of code outside of every replica."""
        ...


class ReplicaLike(Protocol):
    """A `kerasdist.ReplicaContext`, by what it can be asked."""

    @property
    def strategy(self) -> StrategyLike:
        """The strategy that runs the step."""
        ...

    @property
    def replica_id_in_sync_group(self) -> Any:
        """This replica's number."""
        ...

    @property
    def num_replicas_in_sync(self) -> int:
        """How many replicas take part."""
        ...

    @property
    def collectives(self) -> Any:
        """The replica's `Collectives`."""
        ...

    @property
    def local_batch(self) -> Any:
        """Its `LocalBatch` in a step of `fit`, else None."""
        ...

    @property
    def weight(self) -> Any:
        """Its weight among the examples in a step of `fit`."""
        ...

    @property
    def layer_losses(self) -> dict[int, tuple[Any, list[Any]]]:
        """Losses that layers added in this replica."""
        ...


class _Here(threading.local):
    """The scopes and the replica of the calling thread."""

    def __init__(self) -> None:
        self.scopes: list[StrategyLike] = []
        self.replicas: list[ReplicaLike | None] = []
        self.placements: list[Placement] = []


_here = _Here()
_default: list[StrategyLike] = []

# By name, since that module imports this one.
_DEFAULT_HOME = "kerasdist.api.strategy"


def default_strategy() -> StrategyLike:
    """Returns the strategy that is in force outside every scope."""
    if not _default:
        _default.append(importlib.import_module(_DEFAULT_HOME).DefaultStrategy())
    return _default[0]


@contextmanager
def strategy_scope(strategy: StrategyLike) -> Generator[None]:
    """Makes `strategy` the one in force in this thread."""
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
def replica_scope(context: ReplicaLike | None) -> Generator[None]:
    """Runs the code inside in a replica's context.

    None stands for cross-replica code that replica code calls.
    """
    _here.replicas.append(context)
    try:
        yield
    finally:
        _here.replicas.pop()


class Placement(abc.ABC):
    """A context in which a framework places variables, that plain Keras must not run in."""

    def __enter__(self) -> None:
        self.renew()
        _here.placements.append(self)

    def __exit__(self, *error: object) -> None:
        _here.placements.remove(self)
        self.leave(*error)

    @abc.abstractmethod
    def renew(self) -> None:
        """Enters the context, for the first time or again."""

    @abc.abstractmethod
    def leave(self, *error: object) -> None:
        """Leaves the context; `renew` may enter it again."""


def open_placements() -> list[Placement]:
    """Returns the placements that are open in this thread, the outermost first."""
    return _here.placements


@contextmanager
def placements_left() -> Generator[None]:
    """Runs code as if no placement were open in this thread."""
    placements, _here.placements = _here.placements, []
    for one in reversed(placements):
        one.leave()
    try:
        yield
    finally:
        for one in placements:
            one.renew()
        _here.placements = placements


def replica() -> ReplicaLike | None:
    """Returns the current replica, None outside of replicas and in the default strategy."""
    return _here.replicas[-1] if _here.replicas else None


def one_device_replica() -> ReplicaLike | None:
    """Returns the current replica in a step of `fit`, `evaluate` or `predict`, else None."""
    found = _here.replicas[-1] if _here.replicas else None
    return None if found is None or found.local_batch is None else found


def enclosing_replica() -> ReplicaLike | None:
    """Returns the replica whose code called this code, even through `merge_call`."""
    for context in reversed(_here.replicas):
        if context is not None:
            return context
    return None


def scoped_strategy() -> StrategyLike | None:
    """Returns the strategy of the open scope or the current replica, None outside of both."""
    inside = enclosing_replica() if _here.replicas else None
    if inside is not None:
        return inside.strategy
    return _here.scopes[-1] if _here.scopes else None


def strategy_in_force() -> StrategyLike:
    """Returns the strategy of the open scope or the current replica, else the default one."""
    return scoped_strategy() or default_strategy()


def replica_context_in_force() -> ReplicaLike | None:
    """Returns the context of the replica whose code this is, None in cross-replica code."""
    if _here.replicas:
        return _here.replicas[-1]
    if _here.scopes and _here.scopes[-1] is not default_strategy():
        return None
    return default_strategy().sole_replica_context


def require_cross_replica(call: str, instead: str) -> None:
    """Refuses a method of a strategy in a replica's code, unless there is but one replica."""
    inside = replica()
    if inside is not None and inside.num_replicas_in_sync > 1:
        raise ScopeError(
            f"Expected strategy.{call} in cross-replica context. Received: a call in replica "
            f"{inside.replica_id_in_sync_group} of {inside.strategy}. There use: {instead}."
        )
