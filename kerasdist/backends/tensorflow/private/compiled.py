"""Private API of ``tf.function`` and AutoGraph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.autograph.core import ag_ctx
from tensorflow.python.autograph.impl import api as autograph_api
from tensorflow.python.autograph.pyct import error_utils
from tensorflow.python.eager.polymorphic_function import autograph_util, polymorphic_function
from tensorflow.python.ops import control_flow_util

from kerasdist.job.job import FUNCTION, translating_failures


def converted_as_here(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a user function; AutoGraph converts it if it converted the calling code."""
    here = tf.__internal__.autograph.control_status_ctx()
    return tf.__internal__.autograph.tf_convert(function, here, convert_by_default=False)


def error_with_own_type(error: Exception) -> Exception:
    """Returns the user's error for the one that AutoGraph raised in its place.

    AutoGraph recreates errors of common types, with a message that shows the user's lines. Errors
    of other types it replaces by its own types.
    """
    stand_ins = (autograph_api.StagingError, error_utils.MultilineMessageKeyError)
    if isinstance(error, stand_ins) and isinstance(error.__context__, Exception):
        error = error.__context__
        vars(error).pop("ag_error_metadata", None)
        error.ag_pass_through = True  # type: ignore[attr-defined]
    return error


def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the code of a ``tf.function``, as AutoGraph converts it there; others as they are."""
    if not isinstance(function, polymorphic_function.Function):
        return function
    code = function.python_function
    if not function._autograph:
        return code
    converted = autograph_util.py_func_from_autograph(code)

    def uncompiled_code(*args: object, **kwargs: object) -> Any:
        with ag_ctx.ControlStatusCtx(ag_ctx.Status.ENABLED):
            return converted(*args, **kwargs)

    return uncompiled_code


def asks_for_xla(function: Callable[..., Any]) -> bool:
    """Returns whether a function is a ``tf.function`` with ``jit_compile=True``."""
    return isinstance(function, polymorphic_function.Function) and bool(function._jit_compile)


def compiled_likewise(compiled: Any, function: Callable[..., Any]) -> Any:
    """Returns a ``tf.function`` with the options of another one."""
    return compiled._clone(python_function=function)


class _Explained(polymorphic_function.Function):
    """A ``tf.function`` that raises kerasdist's error if a worker is lost during a call."""

    def __call__(self, *args: object, **kwargs: object) -> Any:
        with translating_failures(FUNCTION):
            return super().__call__(*args, **kwargs)


def explained(compiled: object) -> Any:
    """Makes a ``tf.function`` raise an error that names the lost worker, if one is lost.

    It stays a ``tf.function``, so that users can get its graphs or save it.
    """
    compiled.__class__ = _Explained
    return compiled


def compiles_with_xla() -> bool:
    """Returns whether XLA will compile the graph that is being traced."""
    return control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph())
