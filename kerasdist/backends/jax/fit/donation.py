"""Decides which arrays of variables a program may consume, so that XLA can reuse their memory.

A consumed array (JAX calls it donated) is deleted for all code that refers to it. So a program
consumes an array only if an earlier program has returned that array for a variable, and no code has
read the variable since then. A hook into Keras variables notes each read (`mark_read`). If an array
does not meet both conditions, the program consumes a copy of it.

The steps of `fit` consume all arrays of a model. For this, Keras takes the arrays out of the
variables. Code that reads a variable meanwhile, in a callback or another thread, gets a copy.
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

# Only one thread at a time launches a step of `fit` or copies an array that a step may consume.
# JAX crashes if a thread copies an array that another program consumes (seen with 0.10.2).
launching = threading.RLock()

# Maps a variable to its array, if nothing but the variable refers to the array.
_unread: VariableTable[jax.Array] = VariableTable()


@dataclass(frozen=True)
class _InSteps:
    """The thread whose steps hold a variable's value, and a method that copies the value.

    `mark_in_steps` describes the method's arguments `name` and `index`.
    """

    thread: int
    copied: weakref.WeakMethod[Any]
    name: str
    index: int


_in_steps: VariableTable[_InSteps] = VariableTable()


# Maps the id of a variable to a thread. That thread is passing the variable's value to a program,
# and will then store the new value in the variable.
_passed: dict[int, int] = {}
_passed_on = threading.Condition()


@contextmanager
def passing(keys: Iterable[int]) -> Generator[None]:
    """Opens a context in which no other thread passes these variables, given by id, to a program.

    Waits until other threads have stored the new values of these variables.
    """
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
    """Reads a Keras variable, even while steps of `fit` hold its value.

    The caller must call `mark_read` first, so that no program consumes an array that is returned.
    """
    known = _in_steps.get(variable)
    while known is not None and keras_compat.get_stateless_scope() is None:
        stored, copied = keras_compat.stored_value(variable), known.copied()
        is_own = threading.get_ident() == known.thread
        if copied is None or (is_own and stored is not None and not stored.is_deleted()):
            break
        # A thread that does not run the steps gets a copy, even if the variable holds an array,
        # because the next step may consume that array.
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
    # In a job of several workers a variable holds a global array, with which one worker alone
    # cannot compute. So the code that reads the variable gets this worker's copy.
    scope = keras_compat.get_stateless_scope()
    value = None if scope is None else scope.get_current_value(variable)
    return keras_compat.autocast(variable, own if value is None else value)


def mark_in_steps(
    variables: Iterable[keras.Variable], copied: Callable[..., Any], name: str
) -> None:
    """Makes variables readable while steps of this thread hold their values.

    During such steps, a read of a variable calls ``copied(variable, name, index)``, which returns a
    copy of the value. `name` is the name of the model's list of variables that is passed here as
    `variables`, such as "trainable_variables". `index` is the variable's position in this list.
    """
    here, method = threading.get_ident(), weakref.WeakMethod(copied)
    for index, variable in enumerate(variables):
        _in_steps.put(variable, _InSteps(here, method, name, index))


def mark_read(variable: keras.Variable) -> None:
    """Keeps programs from consuming a variable's array, because other code may refer to it."""
    _unread.discard(variable)


def mark_unread(variables: Iterable[keras.Variable], arrays: Iterable[jax.Array]) -> None:
    """Allows the next program to consume these arrays, because only the variables refer to them."""
    for variable, array in zip(variables, arrays, strict=True):
        _unread.put(variable, array)


def consumable(variables: Iterable[keras.Variable], arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns variables' arrays for a program that consumes its inputs.

    An array is copied if other code may refer to it.
    """
    return [
        array if _unread.get(variable) is array else copied(array)
        for variable, array in zip(variables, arrays, strict=True)
    ]
