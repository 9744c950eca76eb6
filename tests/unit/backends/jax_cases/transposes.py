"""Gradients of matrix products come in the order of the weights, and are the same numbers."""

import jax
import numpy as np
from jax import numpy as jnp

from kerasdist.backends.jax.transposes import folded
from tests.unit.backends.jax_cases.case import case


def counts(function, *arguments):
    """How many products and transposes a function has, those of its inner functions included."""
    text = str(jax.make_jaxpr(function)(*arguments))
    return text.count("dot_general["), text.count("transpose[")


def check(function, products, transposes, *arguments):
    assert counts(folded(function), *arguments) == (products, transposes)
    expected, found = jax.jit(function)(*arguments), jax.jit(folded(function))(*arguments)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-6, 1e-6), found, expected)


def draw(*shape):
    return jnp.asarray(np.random.default_rng(len(shape)).normal(size=shape), "float32")


def dense(weights, x):
    for one in weights:
        x = jnp.tanh(x @ one)
    return jnp.sum(x)


@case
def gradients_of_dense_layers(strategy):
    weights = [draw(5, 4), draw(4, 3)]
    x = draw(6, 5)
    assert counts(jax.grad(dense), weights, x)[1] > 1
    # The gradient by the first layer's output is a product with the transposed second weight.
    check(jax.grad(dense), 5, 0, weights, x)


@case
def products_over_more_axes_stay(strategy):
    def heads(weight, x):
        return jnp.sum(jnp.sin(jnp.einsum("abc,cde->abde", x, weight)))

    for of, *arguments in (
        (dense, [draw(5, 4)], draw(2, 6, 5)),
        (heads, draw(5, 2, 3), draw(4, 6, 5)),
    ):
        own = counts(jax.grad(of), *arguments)
        assert own[1] > 0
        check(jax.grad(of), *own, *arguments)


@case
def of_a_scan_and_of_a_compiled_function(strategy):
    def steps(weight, x):
        return jax.lax.scan(lambda total, _: (jnp.tanh(total @ weight), None), x, length=3)[0].sum()

    assert counts(folded(jax.grad(steps)), draw(5, 5), draw(6, 5))[1] == 0
    check(jax.grad(jax.jit(steps)), 3, 0, draw(5, 5), draw(6, 5))


@case
def what_is_no_exchange_of_operands_stays(strategy):
    def other_axes(a, b):
        return jnp.transpose(jnp.einsum("abc,cd->abd", a, b), (1, 0, 2))

    def batches(a, b):
        return jnp.transpose(a @ b, (0, 2, 1))

    def returned_too(a, b):
        product = a @ b
        return product, product.T

    def read_twice(a, b):
        product = a @ b
        return product.T, product + 1

    check(other_axes, 1, 1, draw(2, 3, 4), draw(4, 5))
    check(batches, 1, 1, draw(2, 3, 4), draw(2, 4, 5))
    check(returned_too, 1, 1, draw(2, 3), draw(3, 4))
    check(read_twice, 1, 1, draw(2, 3), draw(3, 4))


@case
def precisions_are_exchanged_with_the_operands(strategy):
    def product(a, b):
        return jnp.matmul(a, b, precision=("highest", "default")).T

    text = str(jax.make_jaxpr(folded(product))(draw(2, 3), draw(3, 4)))
    assert "Precision.DEFAULT, Precision.HIGHEST" in text.replace("\n", " "), text


@case
def constants_effects_and_results_without_arrays(strategy):
    seen, table = [], draw(3, 4)

    def function(x):
        jax.debug.callback(seen.append, x.sum())
        return {"a": (x @ table).T, "b": [None, 1.0]}

    check(function, 1, 0, draw(2, 3))
    jax.effects_barrier()
    assert len(seen) == 2
