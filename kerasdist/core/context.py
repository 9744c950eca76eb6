"""Records which strategy is in force, and to which replica the running code belongs.

Each thread has its own strategy and replica, as in ``tf.distribute``: a scope that one thread has
entered has no effect in other threads. Outside every scope a default strategy of one replica is in
force.

The layers below `kerasdist.api` know strategies only by the protocol `StrategyLike`, and contexts
of replicas only by the base class `ReplicaLike`. These layers cannot import the complete classes,
because the complete classes import the layers.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Generator, Mapping, MutableMapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol

from kerasdist.errors import ScopeError


class StrategyLike(Protocol):
    """The members of a `kerasdist.Strategy` that the lower layers use."""

    is_used: bool

    @property
    def num_replicas_in_sync(self) -> int:
        """How many replicas the strategy has, over all workers."""
        ...

    @property
    def local_replicas(self) -> range:
        """The numbers of the replicas in this process."""
        ...

    @property
    def replica_set(self) -> Any:
        """The strategy's `ReplicaSet`; None for the default strategy."""
        ...

    @property
    def options(self) -> Any:
        """The strategy's `ReplicaOptions`."""
        ...

    @property
    def runner(self) -> Any:
        """The strategy's `Runner`, which runs a function on each replica."""
        ...

    @property
    def sole_replica_context(self) -> Any:
        """The `ReplicaContext` for user code that gets the rows of all replicas as one batch."""
        ...

    @property
    def is_chief(self) -> bool:
        """Whether this process is the chief of the workers."""
        ...

    def scope(self) -> AbstractContextManager[StrategyLike]:
        """Opens the strategy's scope."""
        ...


@dataclass(frozen=True, eq=False)
class ReplicaLike:
    """The attributes of a `ReplicaContext` that lower layers use.

    The documentation of `ReplicaContext` describes these attributes.
    """

    strategy: StrategyLike
    replica_id_in_sync_group: Any
    num_replicas_in_sync: int
    # The replica's `Collectives`.
    collectives: Any
    # The replica's `LocalBatch` in a step of `fit`, `evaluate` or `predict`; None in a custom loop.
    local_batch: Any = field(default=None, repr=False)
    # Maps the id of a layer to the layer, and to the losses that the layer added in this replica by
    # `add_loss`. Keras stores such losses in the layer itself, but all replicas share the layer.
    layer_losses: dict[int, tuple[Any, list[Any]]] = field(
        default_factory=dict[int, Any], repr=False
    )


class Current(threading.local):
    """The strategy, replica and other contexts to which the code of the calling thread belongs.

    Attributes:
        replica: The replica whose code is running, for kerasdist's own use; None in cross-replica
            code and under the default strategy.
        fit_replica: The same as `replica` in a step of `fit`, `evaluate` or `predict`, else None.
        trial: The trial in which this thread takes part, or None. A trial is a training step that
            uses copies of the variables.
        updates_copies: Whether the function given to `StrategyExtended.update` is running.
        applies: Whether Keras's own ``optimizer.apply`` runs with gradients that are already sums
            over the replicas. If that optimizer calls the `apply` of another optimizer, as
            `LossScaleOptimizer` does, kerasdist must not sum the gradients again.
        meter: The `Meter` of the `fit` that this thread runs; None if that `fit` is not measured.
        comparison: The comparison of a weight file with a model, which this thread makes before it
            loads the file into the model. None at all other times.
        scopes: The strategies whose scopes are open, the innermost last.
        replicas: The contexts of replicas that this thread has entered, the innermost last.
            `get_replica_context` returns the last one. An entry of None stands for cross-replica
            code that a replica has called by `merge_call`. `whole_step` adds an entry to this
            list, but leaves `replica` None.
        placements: The contexts that this thread has entered, the innermost last, in which a
            framework places new variables on certain devices. Before code of a model without a
            strategy runs, kerasdist leaves these contexts by their method `leave`. After that code,
            it enters them again by `renew`.
        draws_for_all: Whether a replica draws random numbers for all rows of the global batch, as
            after `kerasdist.config.set_draws("global")`.
        issued_for: While this thread issues a collective in place of another thread, a text that
            names the other thread's code; "" at all other times. The record of collectives shows
            this text.
        set_scope: The scope that `kerasdist.experimental_set_strategy` has opened, or None.
    """

    def __init__(self) -> None:
        self.replica: ReplicaLike | None = None
        self.fit_replica: ReplicaLike | None = None
        self.trial: Any = None
        self.updates_copies = False
        self.applies = False
        self.meter: Any = None
        self.comparison: Any = None
        self.scopes: list[StrategyLike] = []
        self.replicas: list[ReplicaLike | None] = []
        self.placements: list[Any] = []
        self.draws_for_all = False
        self.issued_for = ""
        self.set_scope: AbstractContextManager[Any] | None = None


current = Current()

# The module of the default strategy is imported only when it is needed, because that module imports
# this one.
_DEFAULT_HOME = "kerasdist.api.strategy"


@cache
def default_strategy() -> StrategyLike:
    """Returns the strategy that is in force outside every scope."""
    return importlib.import_module(_DEFAULT_HOME).DefaultStrategy()


@contextmanager
def strategy_scope(strategy: StrategyLike) -> Generator[None]:
    """Makes `strategy` the strategy in force in this thread until the block ends."""
    inside = current.replica
    if inside is not None:
        raise ScopeError(
            "Expected strategy.scope() in cross-replica code. Received: a call from inside replica "
            f"{inside.replica_id_in_sync_group} of {inside.strategy}. Enter the scope outside of "
            "the step."
        )
    if current.scopes and current.scopes[-1] not in (strategy, default_strategy()):
        raise ScopeError(
            f"Expected one strategy at a time. Received: the scope of {strategy} inside the scope "
            f"of {current.scopes[-1]}. Leave the first scope before you enter another strategy's."
        )
    current.scopes.append(strategy)
    try:
        yield
    finally:
        current.scopes.pop()


@contextmanager
def replica_scope(context: ReplicaLike | None) -> Generator[None]:
    """Runs the code of the block in a replica's context.

    A `context` of None stands for cross-replica code that a replica's code calls.
    """
    outer = current.replica, current.fit_replica
    is_fit = context is not None and context.local_batch is not None
    current.replica, current.fit_replica = context, context if is_fit else None
    current.replicas.append(context)
    try:
        yield
    except Exception as error:
        if current.fit_replica is not None:
            current.fit_replica.local_batch.note_in(error)
        raise
    finally:
        current.replicas.pop()
        current.replica, current.fit_replica = outer


@contextmanager
def whole_step(strategy: StrategyLike) -> Generator[None]:
    """Runs code that handles the whole global batch.

    In the block `get_replica_context` returns the context of a single replica, but
    `current.replica` stays None.
    """
    current.replicas.append(strategy.sole_replica_context)
    try:
        yield
    finally:
        current.replicas.pop()


@contextmanager
def replaced(owner: object, name: str, value: object) -> Generator[None]:
    """Gives an attribute another value, until the block ends."""
    outer = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, outer)


@contextmanager
def replaced_entries(
    mapping: MutableMapping[str, Any], values: Mapping[str, object]
) -> Generator[None]:
    """Gives entries of a mapping other values, until the block ends."""
    outer = {name: mapping[name] for name in values if name in mapping}
    mapping.update(values)
    try:
        yield
    finally:
        for name in values:
            del mapping[name]
        mapping.update(outer)


@contextmanager
def placements_left() -> Generator[None]:
    """Leaves the contexts that place new variables on certain devices, while the block runs.

    These are the contexts in `current.placements`. They are entered again after the block.
    """
    placements, current.placements = current.placements, []
    for one in reversed(placements):
        one.leave()
    try:
        yield
    finally:
        for one in placements:
            one.renew()
        current.placements = placements


def enclosing_replica() -> ReplicaLike | None:
    """Returns the replica whose code runs, or has called the running code by `merge_call`.

    Returns None if the running code is not called by any replica.
    """
    for context in reversed(current.replicas):
        if context is not None:
            return context
    return None


def scoped_strategy() -> StrategyLike | None:
    """Returns the strategy of the open scope or the current replica, None outside of both."""
    inside = enclosing_replica() if current.replicas else None
    if inside is not None:
        return inside.strategy
    return current.scopes[-1] if current.scopes else None


def strategy_in_force() -> StrategyLike:
    """Returns the strategy of the open scope or the current replica, else the default one."""
    return scoped_strategy() or default_strategy()


def replica_context_in_force() -> ReplicaLike | None:
    """Returns the context of the replica whose code is running, None in cross-replica code.

    Outside of every scope, returns the context of the default strategy's only replica.
    """
    if current.replicas:
        return current.replicas[-1]
    if current.scopes and current.scopes[-1] is not default_strategy():
        return None
    return default_strategy().sole_replica_context


def require_cross_replica(call: str, instead: str) -> None:
    """Raises a `ScopeError` if the running code belongs to one of several replicas.

    The error message names `call`, a method that such code must not call, and `instead`, the code
    to write in its place.
    """
    inside = current.replicas[-1] if current.replicas else None
    if inside is not None and inside.num_replicas_in_sync > 1:
        raise ScopeError(
            f"Expected strategy.{call} in cross-replica context. Received: a call in replica "
            f"{inside.replica_id_in_sync_group} of {inside.strategy}. There use: {instead}."
        )
