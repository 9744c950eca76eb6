"""Mean and variance of a batch that the mesh divides, and their derivatives."""

import jax
import numpy as np
from jax import numpy as jnp

from kerasdist.backends.jax.loops.normalization import moments
from tests.unit.backends.jax_cases.case import case

AXES = (0, 1)


def plain(inputs, mask):
    """What Keras computes on one device."""
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


def rows_and_mask(rows, seed=0):
    draws = np.random.default_rng(seed)
    inputs = draws.normal(3.0, 2.0, size=(rows, 4, 3)).astype("float32")
    return jnp.asarray(inputs), jnp.asarray(draws.uniform(size=(rows, 4)) < 0.6)


def check(strategy, compare):
    layout = strategy.replica_set.arrays.layout

    def divided(inputs, mask):
        return moments(layout, inputs, AXES, mask)

    for rows in (2, 3, 8, 9):
        inputs, mask = rows_and_mask(rows)
        for given in (None, mask):
            compare(divided, inputs, given)


def close(found, expected):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6), found, expected
    )


@case
def moments_are_those_of_the_whole_batch(strategy):
    check(strategy, lambda f, x, m: close(jax.jit(f)(x, m), plain(x, m)))


@case
def moments_have_the_gradient_of_one_device(strategy):
    def compare(divided, inputs, mask):
        gradients = [
            jax.jit(jax.grad(lambda x, f=function: value(f, x, mask)))(inputs)
            for function in (divided, plain)
        ]
        close(*gradients)

    check(strategy, compare)


@case
def moments_have_second_derivatives_forward_and_backward(strategy):
    def compare(divided, inputs, mask):
        def products(function):
            slope = jax.grad(lambda x: value(function, x, mask))
            forward = jax.jvp(slope, (inputs,), (jnp.cos(inputs),))[1]
            return forward, jax.grad(lambda x: jnp.sum(jnp.square(slope(x))))(inputs)

        close(jax.jit(lambda: products(divided))(), jax.jit(lambda: products(plain))())

    check(strategy, compare)


@case
def moments_lose_no_digits_where_the_mean_is_large(strategy):
    layout = strategy.replica_set.arrays.layout
    inputs = (jnp.arange(8.0) + 10_000)[:, None]
    mean, variance = jax.jit(lambda x: moments(layout, x, [0], None))(inputs)
    assert float(mean[0]) == 10_003.5
    np.testing.assert_allclose(variance, [5.25], rtol=1e-5)


@case
def a_replica_whose_rows_are_all_masked_counts_for_nothing(strategy):
    layout = strategy.replica_set.arrays.layout
    inputs, _ = rows_and_mask(8)
    for kept in (slice(4), slice(0)):
        mask = jnp.zeros((8, 4), bool).at[kept].set(True)
        close(jax.jit(lambda m: moments(layout, inputs, AXES, m))(mask), plain(inputs, mask))
