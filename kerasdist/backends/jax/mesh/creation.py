"""Hooks for code that JAX traces: how Keras makes and reads variables, and applies gradients."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import keras

from kerasdist import keras_compat
from kerasdist.backends.base.variable_rules import terms_of_initial_value
from kerasdist.backends.jax.fit import donation
from kerasdist.backends.jax.loops import normalization, scopes
from kerasdist.backends.jax.mesh.arrays import is_traced


@cache
def install() -> None:
    """Installs, once per process, the hooks into Keras that only the JAX backend uses."""
    keras_compat.install(variable_made=_made, read=_read, apply_scaled=_apply_scaled)
    normalization.install()


def _made(
    original: Any,
    variable: keras.Variable,
    initializer: Any,
    shape: Any = None,
    dtype: Any = None,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Makes a variable, also in code that JAX traces.

    In code that JAX traces, Keras needs an initializer, because the variable gets its value only
    after the trace. So an initial value that is an array is wrapped in an initializer.
    """
    if (
        scopes.current() is not None
        and not callable(initializer)
        and not isinstance(initializer, str)
    ):
        with jax.ensure_compile_time_eval():
            constant: Any = keras.ops.convert_to_tensor(initializer, dtype)
        if not is_traced(constant):
            shape, dtype = tuple(constant.shape), dtype or constant.dtype
            initializer = lambda *_, **__: constant  # noqa: E731
    original(variable, initializer, shape, dtype, *args, **kwargs)
    terms = terms_of_initial_value(variable)
    if terms == 1:
        return
    value = keras_compat.stored_value(variable)
    if value is None:
        keras_compat.multiply_initializer(variable, terms)
    else:
        keras_compat.store_value(variable, value * terms)


def _read(original: Any, variable: Any) -> Any:
    donation.mark_read(variable)
    value = scopes.read_through(variable)
    if value is not None:
        return keras_compat.autocast(variable, value)
    return donation.read(original, variable)


def _apply_scaled(
    original: Any, optimizer: keras.Optimizer, grads: Any, trainable_variables: Any = None
) -> Any:
    if scopes.current() is None:
        return original(optimizer, grads, trainable_variables)
    return keras_compat.apply_scaled_gradients(optimizer, list(grads), trainable_variables)
