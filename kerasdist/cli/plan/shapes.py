"""The variables of a planned script: large variables have shapes, but no values.

Keras itself makes variables without values while it infers shapes. A read of such a variable
computes the initial value anew, which costs nothing if JAX is tracing. So a script can build a
model that does not fit into this machine's memory. If the script assigns a value to such a
variable, the value is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import cache
from typing import Any, final

import keras
import numpy as np

from kerasdist import keras_compat
from kerasdist.core.context import replaced
from kerasdist.core.ownership import VariableTable
from kerasdist.errors import InputError
from kerasdist.keras_compat.internals import INITIALIZE, INITIALIZE_LATER, INITIALIZER

# A variable of fewer bytes, such as a counter or a seed, has a value, because code that builds a
# model reads such values.
_SMALL_BYTES = 2**20
# The most bytes of initial values that a script may read, for example to quantize weights.
_READ_BYTES = 2**31

_shapes: VariableTable[bool] = VariableTable()


@final
class _Running:
    """Whether a script is running, and how many bytes of initial values it has read."""

    is_now = False
    read_bytes = 0


@contextmanager
def of_large_variables() -> Generator[None]:
    """Lets the code inside of the block make large variables without values."""
    for internal in (INITIALIZE, INITIALIZE_LATER, INITIALIZER):
        internal.require()
    _install()
    _Running.read_bytes = 0
    with replaced(_Running, "is_now", True):
        yield


@cache
def _install() -> None:
    """Hooks into how Keras makes, reads and writes variables, once per process."""
    keras_compat.install(
        keep_shape=_keep_shape,
        keep_shape_later=_keep_shape_later,
        assign_shape=_assign,
        read_shape=_read,
    )


def _keep_shape(
    original: Callable[..., None], variable: keras.Variable, initializer: object
) -> None:
    if not _Running.is_now or keras_compat.nbytes(variable) < _SMALL_BYTES:
        original(variable, initializer)
        return
    keras_compat.store_value(variable, None)
    INITIALIZER.set(variable, initializer)
    _shapes.put(variable, True)


def _keep_shape_later(original: Callable[..., None], variable: keras.Variable) -> None:
    """Handles a variable that was made in a stateless scope and is initialized after the scope."""
    if not _Running.is_now or keras_compat.nbytes(variable) < _SMALL_BYTES:
        original(variable)
    else:
        _shapes.put(variable, True)


def _assign(original: Callable[..., object], variable: keras.Variable, value: Any) -> object:
    in_scope = keras_compat.get_stateless_scope() is not None
    if in_scope or _shapes.get(variable) is None or np.shape(value) != tuple(variable.shape):
        return original(variable, value)  # if the shape is wrong, Keras raises its error
    return value


def _read(original: Callable[..., object], variable: keras.Variable) -> object:
    if _shapes.get(variable) is not None and keras_compat.get_stateless_scope() is None:
        _Running.read_bytes += keras_compat.nbytes(variable)
        if _Running.read_bytes > _READ_BYTES:
            raise InputError(
                "Expected code that reads no values of large variables before the first training "
                "step, because a plan makes no such values. Received: reads of more than "
                f"{_READ_BYTES / 1e9:.1f} GB, the last of variable={variable.path!r}. Leave out "
                "code that reads weights: copies, quantization, conversions, prints."
            )
    return original(variable)
