"""Mean and variance of a batch that the mesh divides, and their derivatives."""

import functools

import numpy as np

from tests.conformance.lazy import LazyModule, jax, jnp
from tests.facade.case import of_backend

normalization = LazyModule("kerasdist.backends.jax.loops.normalization")
case = of_backend("jax")
AXES = (0, 1)


def plain(inputs, mask):
    if mask is None:
        return inputs.mean(AXES), inputs.var(AXES)
    weights = jnp.broadcast_to(mask[..., None], inputs.shape).astype(inputs.dtype)
    count = weights.sum(AXES) + 1e-7
    mean = (weights * inputs).sum(AXES) / count
    return mean, (weights * jnp.square(inputs - mean)).sum(AXES) / count


def value(function, inputs, mask):
    """A number that depends on every mean and variance, and not linearly."""
    mean, variance = function(inputs, mask)
    return jnp.sum(jnp.sin(mean) * jnp.arange(1.0, 4.0)) + jnp.sum(jnp.sqrt(variance + 0.1))


def rows_and_mask(rows):
    draws = np.random.default_rng(0)
    inputs = draws.normal(3.0, 2.0, size=(rows, 4, 3)).astype("float32")
    return jnp.asarray(inputs), jnp.asarray(draws.uniform(size=(rows, 4)) < 0.6)


def close(found, expected):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6), found, expected
    )


@case
def moments_and_their_derivatives_are_those_of_the_whole_batch(strategy):
    """First and second ones, forward and backward; with a replica whose rows are all masked.

    No digits are lost where the mean is large.
    """
    layout = strategy.replica_set.arrays.layout

    def divided(inputs, mask):
        return normalization.moments(layout, inputs, AXES, mask)

    @functools.partial(jax.jit, static_argnums=0)
    def computed(function, inputs, mask):
        slope = jax.grad(lambda x: value(function, x, mask))
        forward = jax.jvp(slope, (inputs,), (jnp.cos(inputs),))[1]
        backward = jax.grad(lambda x: jnp.sum(jnp.square(slope(x))))(inputs)
        return function(inputs, mask), slope(inputs), forward, backward

    for rows in (3, 8):
        inputs, drawn = rows_and_mask(rows)
        for mask in (None, drawn.at[rows // 2 :].set(False)):
            close(computed(divided, inputs, mask), computed(plain, inputs, mask))
    large = (jnp.arange(8.0) + 10_000)[:, None]
    mean, variance = jax.jit(lambda x: normalization.moments(layout, x, [0], None))(large)
    assert float(mean[0]) == 10_003.5
    np.testing.assert_allclose(variance, [5.25], rtol=1e-5)
