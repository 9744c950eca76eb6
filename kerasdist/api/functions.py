"""`kerasdist.function` and `kerasdist.value_and_grad`: a training step, backend-neutral."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, overload

import keras

from kerasdist.backends import registry
from kerasdist.core.earlier_names import refuse_arguments


@overload
def function(
    fn: Callable[..., Any], *, jit_compile: bool = False, **given: Any
) -> Callable[..., Any]: ...


@overload
def function(
    fn: None = None, *, jit_compile: bool = False, **given: Any
) -> Callable[[Callable[..., Any]], Callable[..., Any]]: ...


def function(
    fn: Callable[..., Any] | None = None, *, jit_compile: bool = False, **given: Any
) -> Any:
    """Compiles a step of a custom loop, as the backend compiles: a decorator.

    On TensorFlow ``tf.function``; on JAX ``jax.jit``, with the Keras variables that the step reads
    and writes found by tracing it, and given back to it without a copy; on PyTorch the function
    itself, or ``torch.compile`` with `jit_compile`.

    Example::

        @kd.function
        def train_step(batch):
            per_replica_losses = strategy.run(replica_step, args=(batch,))
            return strategy.reduce("SUM", per_replica_losses, axis=None)

    Args:
        fn: Takes and returns tensors, distributed values, and nested structures of them. Other
            arguments are constants to it: it is compiled for each value.
        jit_compile: Whether to compile with XLA on TensorFlow, and with ``torch.compile`` on
            PyTorch. JAX always does.
        **given: Arguments of ``tf.function``, which are refused.

    Returns:
        The compiled function, or without `fn` a decorator.
    """
    refuse_arguments("kerasdist.function", given)
    if fn is None:
        return lambda decorated: function(decorated, jit_compile=jit_compile)
    return registry.current().function(fn, jit_compile)


def value_and_grad(
    fn: Callable[[], Any], variables: Sequence[keras.Variable], has_aux: bool = False
) -> tuple[Any, list[Any]]:
    """Calls a function and differentiates its value by variables.

    What the function assigns to other variables, such as moving statistics and the state of random
    generators, stays assigned.

    Example::

        def loss():
            return loss_function(y, model(x, training=True))

        value, gradients = kd.value_and_grad(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)

    Args:
        fn: Takes nothing; returns a scalar tensor, or with `has_aux` a pair of it and anything.
        variables: Keras variables.
        has_aux: Whether the function returns a pair.

    Returns:
        What the function returned, and a list of gradients in the order of `variables`: None for a
        variable that the function did not read, zeros for one that it read and that has no
        influence on the value.

    Raises:
        ValueError: If the function returns no scalar, or with `has_aux` no pair.
    """

    def checked() -> Any:
        returned = fn()
        _check(returned, has_aux)
        return returned

    return registry.current().value_and_grad(checked, list(variables), has_aux)


def _check(returned: Any, has_aux: bool) -> None:
    if has_aux and not (isinstance(returned, tuple | list) and len(returned) == 2):
        raise ValueError(
            "Expected a pair of a scalar and anything from a function that is differentiated with "
            f"has_aux=True. Received: {returned!r:.200}. Return (value, aux)."
        )
    value = returned[0] if has_aux else returned
    shape = getattr(value, "shape", ())
    if isinstance(value, tuple | list | dict) or len(shape) > 0:
        raise ValueError(
            "Expected a scalar from a function that is differentiated. Received: a value of type "
            f"{type(value).__name__} and shape {tuple(shape)}. Return a sum or a mean of it; what "
            "else the function computes goes into a pair, with has_aux=True."
        )
