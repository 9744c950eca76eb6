"""What Keras does otherwise in the code of a program: how it makes variables, above all."""

from __future__ import annotations

from functools import cache
from typing import Any, final

import jax
import jax.core
import keras

from kerasdist import context, keras_seam
from kerasdist.backends.jax import scopes
from kerasdist.backends.jax.components import is_read_by_sum


@cache
def install() -> None:
    """Puts the hooks into Keras that only JAX needs, once in a process."""
    keras_seam.install_in_variables(_made)
    keras_seam.install_scope_reads(scopes.read_through)
    keras_seam.install_scaled_apply(_apply_scaled)


def _made(
    original: Any,
    variable: Any,
    initializer: Any,
    shape: Any = None,
    dtype: Any = None,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Lets a variable be made of a value, not only of an initializer, in the code of a program."""
    if (
        scopes.current() is not None
        and not callable(initializer)
        and not isinstance(initializer, str)
    ):
        with jax.ensure_compile_time_eval():
            value: Any = keras.ops.convert_to_tensor(initializer, dtype)
        if not isinstance(value, jax.core.Tracer):
            initializer, shape, dtype = _Constant(value), tuple(value.shape), dtype or value.dtype
    original(variable, initializer, shape, dtype, *args, **kwargs)
    strategy = context.scoped_strategy()
    if strategy is None or strategy.num_replicas_in_sync == 1 or not is_read_by_sum(variable):
        return
    # Each replica starts with what the initializer says, so that the value is the sum of that.
    value = keras_seam.stored_value(variable)
    if value is None:
        keras_seam.multiply_initializer(variable, strategy.num_replicas_in_sync)
    elif value.dtype != bool:
        keras_seam.store_value(variable, value * strategy.num_replicas_in_sync)


def _apply_scaled(
    original: Any, optimizer: Any, grads: Any, trainable_variables: Any = None
) -> Any:
    if scopes.current() is None:
        return original(optimizer, grads, trainable_variables)
    return keras_seam.apply_scaled_gradients(optimizer, list(grads), trainable_variables)


@final
class _Constant:
    """Gives a new variable its value."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __call__(self, *_: Any, **__: Any) -> Any:
        return self._value
