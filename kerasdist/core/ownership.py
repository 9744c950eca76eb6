"""Records under which strategy each variable was made, and which strategies exist.

It also records the variables of optimizers (slots), and to which weight each of them belongs.
"""

from __future__ import annotations

import weakref
from typing import Any, Generic, TypeVar, final

from kerasdist.core.context import StrategyLike, current
from kerasdist.errors import ScopeError

_Entry = TypeVar("_Entry")


@final
class VariableTable(Generic[_Entry]):
    """A table with one entry per variable. An entry is removed once its variable is deleted."""

    def __init__(self) -> None:
        """Makes an empty table."""
        self._entries: dict[int, tuple[weakref.ref[Any], _Entry]] = {}

    def get(self, variable: Any) -> _Entry | None:
        """Returns a variable's entry, None if it has none."""
        known = self._entries.get(id(variable))
        return known[1] if known is not None and known[0]() is variable else None

    def put(self, variable: Any, entry: _Entry) -> None:
        """Stores a variable's entry and replaces an earlier one."""
        key, entries = id(variable), self._entries
        entries[key] = weakref.ref(variable, lambda _: entries.pop(key, None)), entry

    def discard(self, variable: Any) -> None:
        """Removes a variable's entry, if it has one."""
        self._entries.pop(id(variable), None)

    def variables(self) -> list[Any]:
        """Returns the variables that have an entry."""
        return [one for known, _ in list(self._entries.values()) if (one := known()) is not None]


_made_under: VariableTable[weakref.ref[StrategyLike]] = VariableTable()

# For each variable of an optimizer: the weight to which the variable belongs, if there is one.
_weights: VariableTable[tuple[Any]] = VariableTable()

# All strategies that have several replicas, and that still exist.
_strategies: weakref.WeakSet[StrategyLike] = weakref.WeakSet()


def remember(strategy: StrategyLike) -> None:
    """Records a strategy, if it has several replicas, so that `unused_strategy` can find it."""
    if strategy.num_replicas_in_sync > 1:
        _strategies.add(strategy)


def unused_strategy() -> StrategyLike | None:
    """Returns a strategy of several replicas in whose scope no model was made, or None."""
    return next((strategy for strategy in _strategies if not strategy.is_used), None)


def any_is_used() -> bool:
    """Returns whether a model was made in the scope of any strategy with several replicas."""
    return any(strategy.is_used for strategy in _strategies)


def record_owner(variable: object, strategy: StrategyLike) -> None:
    """Records the strategy that a variable is made under."""
    _made_under.put(variable, weakref.ref(strategy))


def variables_of(strategy: StrategyLike) -> list[Any]:
    """Returns a strategy's variables that still exist, in the order in which they were made."""
    return [one for one in _made_under.variables() if strategy_of(one) is strategy]


def record_slot(variable: Any, weight: Any) -> None:
    """Records that a variable belongs to an optimizer, and to a weight if `weight` is not None."""
    # For a variable that belongs to no weight, `weight` may be `variable` itself. None is stored in
    # that case, because an entry that refers to its own variable would keep the variable alive.
    _weights.put(variable, (None if weight is variable else weight,))


def is_slot(variable: Any) -> bool:
    """Returns whether `record_slot` has recorded that a variable belongs to an optimizer."""
    return _weights.get(variable) is not None


def weight_of(variable: Any) -> Any:
    """Returns the weight to which an optimizer's variable belongs.

    If `variable` is no variable of an optimizer, or belongs to no weight, returns `variable`.
    """
    known = _weights.get(variable)
    return variable if known is None or known[0] is None else known[0]


def require_own(variable: Any) -> None:
    """Raises an error if a replica in a custom loop assigns to a variable of another strategy."""
    replica = current.replica
    if replica is None or replica.local_batch is not None:
        return
    owner = strategy_of(variable)
    if owner is not None and owner is not replica.strategy:
        raise ScopeError(
            "Expected a variable that was made in the scope of the strategy whose replica assigns "
            f"to it. Received: variable={variable.path!r} of {owner}, in a replica of "
            f"{replica.strategy}. Use one strategy for a model and its training loop."
        )


def strategy_of(variable: object) -> StrategyLike | None:
    """Returns the strategy that a variable was made under, None if there was none."""
    owner = _made_under.get(variable)
    return None if owner is None else owner()
