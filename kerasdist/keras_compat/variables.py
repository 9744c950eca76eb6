"""Access to the stored values of Keras's variables, even while a stateless scope is open.

A stateless scope of Keras redirects reads and writes of variables. A trial of kerasdist does the
same: it is a training step that uses copies of the variables.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import repeat
from operator import attrgetter
from typing import Any

import keras
import numpy as np

from kerasdist.core.context import current, replaced
from kerasdist.keras_compat import internals
from kerasdist.keras_compat.models import ops
from kerasdist.keras_compat.thread_state import KNOWN, keep_of_thread, name_of_scope, of_thread


def change_aggregation(variable: Any, aggregation: str, value: Any) -> None:
    """Changes how replicas aggregate a variable, and sets the variable's value."""
    internals.AGGREGATION.set(variable, aggregation)
    internals.REMAKE.of(variable)(ops.convert_to_tensor(value, variable.dtype))


def set_replication(variable: Any, synchronization: str, aggregation: str) -> None:
    """Sets how replicas synchronize and aggregate a variable.

    The framework's own variable inside of `variable` changes only when `reinitialize` replaces it.
    """
    internals.SYNCHRONIZATION.set(variable, synchronization)
    internals.AGGREGATION.set(variable, aggregation)


def reinitialize(variable: keras.Variable) -> None:
    """Replaces the framework's variable inside `variable` by a copy made in the current scope."""
    internals.REMAKE.of(variable)(variable.numpy())


@contextmanager
def in_trial(trial: object) -> Iterator[None]:
    """Lets the code in the block read and write a trial's copies of variables.

    If `trial` is None, the code uses the variables themselves. Open stateless scopes are ignored.
    """
    with replaced(current, "trial", trial), outside_stateless_scopes():
        yield


@contextmanager
def outside_stateless_scopes() -> Iterator[None]:
    """Lets the code in the block read and write stored values, ignoring open scopes.

    Stored values are in the variables themselves; in a trial they are in the trial's copies.
    """
    # Each step enters this context often, so the code avoids function calls.
    name = KNOWN["scope"] if "scope" in KNOWN else name_of_scope()
    if name is None:  # Keras stores scopes in another way, so strategies are refused
        yield
        return
    place = internals.THREAD_STATE.place
    threads = getattr(*place)
    scope = getattr(threads, name, None)
    setattr(threads, name, current.trial)
    try:
        yield
    finally:
        setattr(getattr(*place), name, scope)


class InnerScope(keras.StatelessScope):
    """A stateless scope that passes assignments on to the stateless scope around it.

    If there is no scope around it, an assignment changes the variable at once.
    """

    def add_update(self, update: tuple[Any, Any]) -> None:
        """Assigns to a variable as if this scope were not open."""
        if self.original_scope is not None:
            self.original_scope.add_update(update)
            return
        variable, value = update
        with outside_stateless_scopes():
            variable.assign(value)


def initialize_waiting_variables() -> None:
    """Initializes the variables that this thread made while a stateless scope was open."""
    waiting = of_thread(internals.WAITING_VARIABLES) or ()
    keep_of_thread(internals.WAITING_VARIABLES, [])
    for variable in waiting:
        initialize_waiting_variable(variable)


def initialize_waiting_variable(variable: keras.Variable) -> None:
    """Initializes a variable that was made while a stateless scope was open."""
    if variable._value is None:
        with outside_stateless_scopes():
            internals.INITIALIZE_LATER.of(variable)()


def stored_value(variable: keras.Variable) -> Any:
    """Returns a variable's stored value, ignoring open scopes; None if it has no value yet.

    In a trial this is the value of the trial's copy. The result is also None if this version of
    Keras stores values in another way. With such a version, strategies refuse to make variables,
    and models without a strategy read their variables by Keras's own code.
    """
    trial = current.trial
    return getattr(variable, "_value", None) if trial is None else trial.get_current_value(variable)


def value_reader() -> Callable[[keras.Variable], Any]:
    """Returns a function that reads stored values.

    The function is valid until a trial begins or ends. After that, call `value_reader` again.
    """
    return attrgetter("_value") if current.trial is None else current.trial.get_current_value


def held_value(variable: keras.Variable) -> Any:
    """Returns the value that the variable itself holds, even in a trial."""
    return variable._value


def stored_values(variables: Iterable[keras.Variable]) -> list[Any]:
    """Returns the stored values of variables (see `stored_value`), faster than one by one."""
    return list(map(value_reader(), variables))


def store_value(variable: Any, value: Any) -> None:
    """Sets a variable's stored value, ignoring open scopes."""
    variable._value = value


def store_values(variables: Sequence[keras.Variable], values: Sequence[Any]) -> None:
    """Sets the stored values of variables (see `store_value`).

    If the user interrupts the program, either all of the values are set or none.
    """
    # All values are set in one call of C code, and Python raises KeyboardInterrupt only between
    # bytecode instructions.
    deque(map(setattr, variables, repeat("_value"), values), maxlen=0)


def multiply_initializer(variable: Any, factor: int) -> None:
    """Multiplies the initial value of a variable that has no value yet."""
    initializer = internals.INITIALIZER.of(variable)

    def multiplied(*args: object, **kwargs: object) -> Any:
        return initializer(*args, **kwargs) * factor

    internals.INITIALIZER.set(variable, multiplied)


def stored_dtype(variable: Any) -> str:
    """Returns the type in which a variable is stored; with autocast, reads may return another."""
    dtype = getattr(variable, internals.DTYPE.attribute, None)
    if dtype is not None:
        return dtype
    value = variable._value
    return keras.backend.standardize_dtype(variable.dtype if value is None else value.dtype)


def nbytes(variable: keras.Variable, shape: Sequence[int] | None = None) -> int:
    """Returns the size in bytes of a variable's value, or of a shard with the given shape."""
    elements = math.prod(variable.shape if shape is None else shape)
    return elements * np.dtype(stored_dtype(variable)).itemsize


def autocast(variable: Any, value: object) -> Any:
    """Returns a variable's value, cast to the type in which the running layer reads variables."""
    if internals.AUTOCAST.path is None and variable.dtype == stored_dtype(variable):
        return value
    return internals.AUTOCAST.of(variable)(value)
