"""The strategies of Keras variables, and the strategies that are not used yet."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from kerasdist.core import context
from kerasdist.core.variable_table import VariableTable
from kerasdist.errors import ScopeError

if TYPE_CHECKING:
    from kerasdist.core.protocols import StrategyLike

_made_under: VariableTable[weakref.ref[StrategyLike]] = VariableTable()


# The strategies with several replicas.
_strategies: weakref.WeakSet[StrategyLike] = weakref.WeakSet()


def remember(strategy: StrategyLike) -> None:
    """Adds a strategy, if it has several replicas."""
    if strategy.num_replicas_in_sync > 1:
        _strategies.add(strategy)


def unused_strategy() -> StrategyLike | None:
    """Returns a strategy of several replicas in whose scope no model was made, None if none is."""
    return next((strategy for strategy in _strategies if not strategy.is_used), None)


def any_is_used() -> bool:
    """Returns whether a strategy of several replicas that still exists is used."""
    return any(strategy.is_used for strategy in _strategies)


def record_owner(variable: Any, strategy: StrategyLike) -> None:
    """Records the strategy that a variable is made under."""
    _made_under.put(variable, weakref.ref(strategy))


def require_own(variable: Any) -> None:
    """Refuses an assignment in a custom loop to a variable of another strategy."""
    replica = context.replica()
    if replica is None or replica.share is not None:
        return
    owner = strategy_of(variable)
    if owner is not None and owner is not replica.strategy:
        raise ScopeError(
            "Expected a variable that was made in the scope of the strategy whose replica assigns "
            f"to it. Received: variable={variable.path!r} of {owner}, in a replica of "
            f"{replica.strategy}. Use one strategy for a model and its training loop."
        )


def strategy_of(variable: Any) -> StrategyLike | None:
    """Returns the strategy that a variable was made under, None if it was made outside of all."""
    owner = _made_under.get(variable)
    return None if owner is None else owner()
