"""Which variables' arrays a program may consume, so that XLA writes the new values over the old.

A consumed (in JAX's word, donated) array is deleted, for all code that refers to it. So a program
consumes an array only if a program has returned it for a variable and no code has read the variable
since, as the hook on reads of Keras variables shows (`keras_compat.install_reads`). In place of any
other array the program consumes a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jax import numpy as jnp

from kerasdist import keras_compat
from kerasdist.variable_table import VariableTable

# A variable's array, if no other code refers to it.
_unread: VariableTable[Any] = VariableTable()


def install() -> None:
    """Installs the hook on reads of Keras variables."""
    keras_compat.install_reads(_read)


def _read(original: Callable[[Any], Any], variable: Any) -> Any:
    mark_read(variable)
    return original(variable)


def mark_read(variable: Any) -> None:
    """Keeps programs from donating the variable's array, to which other code may now refer."""
    _unread.discard(variable)


def mark_unread(variables: Iterable[Any], arrays: Iterable[Any]) -> None:
    """Lets the next program donate the arrays, to which only the variables refer."""
    for variable, array in zip(variables, arrays, strict=True):
        _unread.put(variable, array)


def consumable(variables: Iterable[Any], arrays: Sequence[Any]) -> list[Any]:
    """Returns arrays to donate: the variables' own, or copies if other code may refer to them."""
    return [
        array if _unread.get(variable) is array else jnp.copy(array)
        for variable, array in zip(variables, arrays, strict=True)
    ]
