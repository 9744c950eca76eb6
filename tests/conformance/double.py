"""Keras in double precision, so that rounding cannot hide a difference of another kind.

``keras.config.set_floatx("float64")`` alone does not do it on JAX and PyTorch: there Keras (3.15.1)
computes each mean, variance, product and loss of float64 tensors in float32, since its
``result_type`` never answers float64 ("to be aligned with JAX's default behavior"). Two orders of
summation then differ by 3e-8 of a value, under a strategy or not.
"""

import contextlib
from collections.abc import Iterator

from tests.conformance.compare import Tolerance
from tests.conformance.lazy import keras

FLOAT64 = Tolerance(1e-11, 1e-12, "float64 sums taken in another order")


@contextlib.contextmanager
def double_precision(backend: str, *, narrowed: bool = False) -> Iterator[None]:
    """Everything inside is computed in float64, by plain Keras too unless `narrowed`."""
    from keras.src.backend.common import dtypes

    with contextlib.ExitStack() as stack:
        if backend == "jax":
            import jax

            stack.enter_context(jax.enable_x64(True))
        if not narrowed:
            as_keras_has_it = dtypes.BIT64_TO_BIT32_DTYPE["float64"]
            stack.callback(dtypes.BIT64_TO_BIT32_DTYPE.update, float64=as_keras_has_it)
            dtypes.BIT64_TO_BIT32_DTYPE["float64"] = "float64"
        stack.callback(keras.config.set_dtype_policy, "float32")
        stack.callback(keras.config.set_floatx, keras.config.floatx())
        keras.config.set_floatx("float64")
        keras.config.set_dtype_policy("float64")
        yield
