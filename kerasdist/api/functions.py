"""`kerasdist.function` and `kerasdist.value_and_grad`: training steps that run on every backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, overload

import keras

from kerasdist.backends import registry
from kerasdist.core.earlier_names import refuse_arguments
from kerasdist.keras_compat import ops


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
    """Compiles a step of a custom loop with the backend's own compiler; also a decorator.

    On TensorFlow the compiler is ``tf.function``. On JAX it is ``jax.jit``, and tracing the step
    shows which Keras variables the step reads and writes. The step writes new values into the
    memory of the old ones (JAX calls this donation), so a variable that the step writes needs no
    second copy. On PyTorch the compiler is ``torch.compile`` if `jit_compile` is True; otherwise
    the function is not compiled.

    Example::

        @kd.function
        def train_step(batch):
            per_replica_losses = strategy.run(replica_step, args=(batch,))
            return strategy.reduce("SUM", per_replica_losses, axis=None)

    Args:
        fn: The step, which takes and returns tensors, distributed values, and nested structures of
            these. An argument of any other type counts as a constant, so the function is compiled
            anew for each value of this argument.
        jit_compile: Whether to compile with XLA on TensorFlow, and with ``torch.compile`` on
            PyTorch. JAX compiles with XLA in any case.
        **given: Other arguments of ``tf.function``, which raise an error.

    Returns:
        The compiled function, or a decorator if `fn` is None.
    """
    refuse_arguments("kerasdist.function", given)
    if fn is None:
        return lambda decorated: function(decorated, jit_compile=jit_compile)
    return registry.current().function(fn, jit_compile)


def value_and_grad(
    fn: Callable[[], Any], variables: Sequence[keras.Variable], has_aux: bool = False
) -> tuple[Any, list[Any]]:
    """Calls a function and differentiates the function's value with respect to variables.

    Variables to which the function assigns, such as moving statistics and the state of random
    generators, keep the new values.

    Example::

        def loss():
            return loss_function(y, model(x, training=True))

        value, gradients = kd.value_and_grad(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)

    Args:
        fn: A function without arguments that returns a scalar tensor. With `has_aux` it returns a
            pair: a scalar tensor, and any other value.
        variables: Keras variables.
        has_aux: Whether the function returns a pair.

    Returns:
        The function's result, and a list of gradients in the order of `variables`. The gradient is
        None for a variable that the function did not read, and zeros for a variable that the
        function read but that does not influence the value.

    Raises:
        ValueError: If the function does not return a scalar or, with `has_aux`, does not return a
            pair.
    """

    def pair() -> tuple[Any, Any]:
        returned = fn()
        _check(returned, has_aux)
        value, aux = returned if has_aux else (returned, None)
        return ops.convert_to_tensor(value), aux

    (value, aux), gradients = registry.current().value_and_grad(pair, list(variables))
    return (value, aux) if has_aux else value, gradients


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
            f"{type(value).__name__} and shape {tuple(shape)}. Return its sum or its mean; to "
            "return more than the scalar, return a pair (value, aux), with has_aux=True."
        )
