"""Which variables' arrays a program may consume, so that XLA writes the new values over the old.

A consumed (in JAX's word, donated) array is deleted, for all code that refers to it. So a program
consumes an array only if a program has returned it for a variable and no code has read the variable
since, as the hook on reads of Keras variables shows (`read`). In place of any
other array the program consumes a copy.

The steps of `fit` consume all of a model's arrays, which Keras takes out of the variables for that.
Code that reads them meanwhile, in a callback or another thread, gets a copy.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kerasdist import keras_compat
from kerasdist.backends.jax.mesh.arrays import copied, local_copy
from kerasdist.core.ownership import VariableTable

if TYPE_CHECKING:
    import jax
    import keras

# One thread at a time launches a step of `fit`, or copies an array that a step may consume: JAX's
# process ends if a thread copies an array that another's program consumes (seen with 0.10.2).
launching = threading.RLock()

# A variable's array, if no other code refers to it.
_unread: VariableTable[jax.Array] = VariableTable()


@dataclass(frozen=True)
class _InSteps:
    """The thread whose steps take a variable's value, and a method that copies it meanwhile."""

    thread: int
    copied: weakref.WeakMethod[Any]
    name: str
    index: int


_in_steps: VariableTable[_InSteps] = VariableTable()


# Which threads pass which variables' values, by their ids, to a program, and store the new ones.
_passed: dict[int, int] = {}
_passed_on = threading.Condition()


@contextmanager
def passing(keys: Iterable[int]) -> Generator[None]:
    """Waits until no other thread has these variables, by their ids; other ones may be had."""
    here = threading.get_ident()
    with _passed_on:
        _passed_on.wait_for(lambda: all(_passed.get(key, here) == here for key in keys))
        mine = [key for key in keys if key not in _passed]
        _passed.update(dict.fromkeys(mine, here))
    try:
        yield
    finally:
        with _passed_on:
            for key in mine:
                del _passed[key]
            _passed_on.notify_all()


def read(original: Callable[[Any], Any], variable: keras.Variable) -> Any:
    """Reads a Keras variable, in spite of steps that have its value; `mark_read` comes first."""
    known = _in_steps.get(variable)
    while known is not None and keras_compat.get_stateless_scope() is None:
        stored, copied = keras_compat.stored_value(variable), known.copied()
        is_own = threading.get_ident() == known.thread
        if copied is None or (is_own and stored is not None and not stored.is_deleted()):
            break
        # The next step consumes what is stored too, for which another thread cannot wait.
        copy = copied(variable, known.name, known.index)
        if copy is not None:
            return keras_compat.autocast(variable, copy)
        if is_own:
            break
        time.sleep(0.001)
    stored = keras_compat.stored_value(variable)
    own = local_copy(stored)
    if own is stored:
        return original(variable)
    # On workers a variable holds a global array, with which a worker alone cannot compute.
    scope = keras_compat.get_stateless_scope()
    value = None if scope is None else scope.get_current_value(variable)
    return keras_compat.autocast(variable, own if value is None else value)


def mark_in_steps(
    variables: Iterable[keras.Variable], copied: Callable[..., Any], name: str
) -> None:
    """Lets variables be read while steps of this thread have their values.

    By ``copied(variable, name, index)``.
    """
    here, method = threading.get_ident(), weakref.WeakMethod(copied)
    for index, variable in enumerate(variables):
        _in_steps.put(variable, _InSteps(here, method, name, index))


def mark_read(variable: keras.Variable) -> None:
    """Keeps programs from donating the variable's array, to which other code may now refer."""
    _unread.discard(variable)


def mark_unread(variables: Iterable[keras.Variable], arrays: Iterable[jax.Array]) -> None:
    """Lets the next program donate the arrays, to which only the variables refer."""
    for variable, array in zip(variables, arrays, strict=True):
        _unread.put(variable, array)


def consumable(variables: Iterable[keras.Variable], arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns arrays to donate: the variables' own, or copies if other code may refer to them."""
    return [
        array if _unread.get(variable) is array else copied(array)
        for variable, array in zip(variables, arrays, strict=True)
    ]
