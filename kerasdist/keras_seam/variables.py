"""Keras's variables: what they keep, and the scopes that every read and write of them passes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from keras.src.backend.common import global_state

# Where Keras keeps a thread's state. For the second it has a constant itself from 3.13 on.
_STATELESS_SCOPE = "stateless_scope"


_UNINITIALIZED = "uninitialized_variables"


def change_aggregation(variable: Any, aggregation: str, value: Any) -> None:
    """Replaces the framework's variable by one that is aggregated over replicas in another way.

    Args:
        variable: A Keras variable that no compiled function has seen.
        aggregation: One of Keras's aggregations.
        value: Its value from now on.
    """
    variable._aggregation = aggregation
    variable._initialize(value)


def set_replication(variable: Any, synchronization: str, aggregation: str) -> None:
    """Sets how replicas keep a variable, before `make_anew` makes it for them.

    Args:
        variable: A Keras variable.
        synchronization: One of Keras's synchronizations.
        aggregation: One of Keras's aggregations.
    """
    variable._synchronization = synchronization
    variable._aggregation = aggregation


def make_anew(variable: Any) -> None:
    """Replaces the framework's variable by one with the same value, made in the current scope.

    Args:
        variable: A Keras variable that no compiled function has seen.
    """
    variable._initialize(variable.numpy())


@contextmanager
def outside_stateless_scopes() -> Iterator[None]:
    """Lets code inside read and write the variables themselves, whatever scopes are open."""
    scope = global_state.get_global_attribute(_STATELESS_SCOPE)
    global_state.set_global_attribute(_STATELESS_SCOPE, None)
    try:
        yield
    finally:
        global_state.set_global_attribute(_STATELESS_SCOPE, scope)


def stateless_scope() -> Any:
    """Returns the ``keras.StatelessScope`` that is open in this thread, or None."""
    return global_state.get_global_attribute(_STATELESS_SCOPE)


def initialize_waiting_variables() -> None:
    """Gives values to the variables that this thread made while a stateless scope was open."""
    waiting = global_state.get_global_attribute(_UNINITIALIZED) or ()
    global_state.set_global_attribute(_UNINITIALIZED, [])
    for variable in waiting:
        initialize_waiting_variable(variable)


def initialize_waiting_variable(variable: Any) -> None:
    """Gives its value to a variable that was made while a stateless scope was open.

    Args:
        variable: A Keras variable.
    """
    if variable._value is None:
        with outside_stateless_scopes():
            variable._deferred_initialize()


def stored_value(variable: Any) -> Any:
    """Returns where a variable keeps its value, whatever scopes are open; None if it has none yet.

    Args:
        variable: A Keras variable.
    """
    return variable._value


def stored_values(variables: Iterable[Any]) -> list[Any]:
    """Returns where variables keep their values (see `stored_value`), at less cost.

    Args:
        variables: Keras variables.
    """
    return [variable._value for variable in variables]


def store_value(variable: Any, value: Any) -> None:
    """Puts a value where a variable keeps it, whatever scopes are open.

    Args:
        variable: A Keras variable.
        value: An array of its shape and type.
    """
    variable._value = value


def store_values(variables: Sequence[Any], values: Sequence[Any]) -> None:
    """Puts values where variables keep them (see `store_value`), at less cost.

    Args:
        variables: Keras variables.
        values: Arrays of their shapes and types.
    """
    for variable, value in zip(variables, values, strict=True):
        variable._value = value


def multiply_initializer(variable: Any, factor: int) -> None:
    """Lets a variable that has no value yet begin with a multiple of what was said.

    Args:
        variable: A Keras variable that was made while a stateless scope was open.
        factor: The factor.
    """
    initializer = variable._initializer
    variable._initializer = lambda *args, **kwargs: initializer(*args, **kwargs) * factor


def stored_dtype(variable: Any) -> str:
    """Returns the type in which a variable keeps its value, whatever it is cast to when read.

    Args:
        variable: A Keras variable.
    """
    return variable._dtype
