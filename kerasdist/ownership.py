"""Which strategy a Keras variable was made under, and which strategies wait for their use."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from kerasdist import context
from kerasdist.errors import ScopeError

if TYPE_CHECKING:
    from kerasdist.strategy import Strategy

# By id, since a Keras variable compares by value and cannot be hashed. The entry goes with it.
_made_under: dict[int, tuple[weakref.ref[Any], weakref.ref[Strategy]]] = {}


# Those with several replicas.
_strategies: weakref.WeakSet[Strategy] = weakref.WeakSet()


def remember(strategy: Strategy) -> None:
    """Notes that there is a strategy, if it has several replicas.

    Args:
        strategy: The strategy.
    """
    if strategy.num_replicas_in_sync > 1:
        _strategies.add(strategy)


def unused_strategy() -> Strategy | None:
    """Returns a strategy of several replicas in whose scope no model was made, None if none is."""
    return next((strategy for strategy in _strategies if not strategy.is_used), None)


def any_is_used() -> bool:
    """Returns whether a strategy of several replicas that still exists is used."""
    return any(strategy.is_used for strategy in _strategies)


def note(variable: Any, strategy: Strategy) -> None:
    """Notes under which strategy a variable is made.

    Args:
        variable: The variable.
        strategy: The strategy whose scope, or whose replica code, makes it.
    """
    key = id(variable)
    forget = weakref.ref(variable, lambda _: _made_under.pop(key, None))
    _made_under[key] = (forget, weakref.ref(strategy))


def require_own(variable: Any) -> None:
    """Refuses an assignment in a custom loop to a variable of another strategy.

    Args:
        variable: A Keras variable that is assigned here.

    Raises:
        ScopeError: If this is code of a replica, and the variable another strategy's.
    """
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


def strategy_of(variable: Any) -> Strategy | None:
    """Returns the strategy that a variable was made under, None if it was made outside of all.

    Args:
        variable: A Keras variable.
    """
    noted = _made_under.get(id(variable))
    return None if noted is None else noted[1]()
