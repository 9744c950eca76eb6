"""Uses private functions of ``tf.function`` and AutoGraph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from kerasdist.backends.tensorflow import internals
from kerasdist.job.job import FUNCTION, translating_failures
from kerasdist.training.binding import bind


def converted_as_here(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a user function, converted by AutoGraph if AutoGraph has converted the calling code.

    AutoGraph also converts each `tf.function` that the user function calls, even if the calling
    code runs eagerly.
    """
    here = internals.CONTROL_STATUS.value()
    return internals.CONVERT.value(function, here, convert_by_default=False)


def error_with_own_type(error: Exception) -> Exception:
    """Returns the user's own error if AutoGraph has raised an error of another type instead.

    AutoGraph makes a new error, whose message shows the user's lines. If the user's error has a
    common type, the new error has the same type. Otherwise it has a type that AutoGraph defines.
    """
    own = error.__context__
    if type(error).__module__.startswith("tensorflow.") and hasattr(own, "ag_error_metadata"):
        assert isinstance(own, Exception)
        vars(own).pop("ag_error_metadata")
        own.ag_pass_through = True  # type: ignore[attr-defined]
        return own
    return error


def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the Python function inside of a ``tf.function``; any other function unchanged.

    AutoGraph converts the Python function first, unless the ``tf.function`` has `autograph=False`.
    """
    if not isinstance(function, tf.types.experimental.PolymorphicFunction):
        return function
    code: Any = function.python_function  # type: ignore[attr-defined]
    if not internals.FUNCTION_AUTOGRAPH.of(function):
        return code
    enabled = internals.CONTROL_STATUS_CONTEXT.value(internals.STATUS_ENABLED.value)
    return internals.CONVERT.value(code, enabled, user_requested=True)


def asks_for_xla(function: Callable[..., Any]) -> bool:
    """Returns whether a function is a ``tf.function`` with ``jit_compile=True``."""
    is_compiled = isinstance(function, tf.types.experimental.PolymorphicFunction)
    known = internals.FUNCTION_JIT_COMPILE
    return is_compiled and known.is_there() and bool(known.of(function))


def compiled_likewise(compiled: Any, function: Callable[..., Any]) -> Any:
    """Returns a ``tf.function`` of another function, with the options of `compiled`."""
    return internals.FUNCTION_CLONE.of(compiled)(python_function=function)


def explained(compiled: object) -> Any:
    """Makes a ``tf.function`` raise an error with the worker's name if a call loses a worker.

    The object stays a ``tf.function``, so that users can get its graphs or save it.
    """
    bind(compiled, _Explained)
    return compiled


class _Explained:
    """A mixin for a ``tf.function``: it raises kerasdist's error if a worker is lost in a call."""

    def __call__(self, *args: object, **kwargs: object) -> Any:
        with translating_failures(FUNCTION):
            return super().__call__(*args, **kwargs)  # type: ignore[misc]


def compiles_with_xla() -> bool:
    """Returns whether XLA will compile the graph that is being traced."""
    return internals.IN_XLA.value(tf.compat.v1.get_default_graph())
