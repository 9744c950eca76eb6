"""Which strategy a Keras variable was made under."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kerasdist.strategy import Strategy

# By id, since a Keras variable compares by value and cannot be hashed. The entry goes with it.
_made_under: dict[int, tuple[weakref.ref[Any], weakref.ref[Strategy]]] = {}


def note(variable: Any, strategy: Strategy) -> None:
    """Notes under which strategy a variable is made.

    Args:
        variable: The variable.
        strategy: The strategy whose scope, or whose replica code, makes it.
    """
    key = id(variable)
    forget = weakref.ref(variable, lambda _: _made_under.pop(key, None))
    _made_under[key] = (forget, weakref.ref(strategy))


def strategy_of(variable: Any) -> Strategy | None:
    """Returns the strategy that a variable was made under, None if it was made outside of all.

    Args:
        variable: A Keras variable.
    """
    noted = _made_under.get(id(variable))
    return None if noted is None else noted[1]()
