"""Gradients of weight matrices in the order of the weights, before the devices add them.

JAX writes the gradient of a matrix product's right operand as a product and a transpose of it. On
one device XLA makes one product of the two. On several it puts their sum between them, and on CPUs
the optimizer then reads the sum transposed, an element from each row (ADR 39). Products over more
axes, as of a dense layer on sequences, stay as they are, which is faster there (ADR 46).
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
from jax.extend import core
from jax.extend.core import primitives


def folded(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function to trace, in which each such transpose is a part of its product."""

    @functools.wraps(function)
    def folded(*arguments: Any) -> Any:
        closed, results = jax.make_jaxpr(function, return_shape=True)(*arguments)
        run = core.jaxpr_as_fun(_folded_in(closed))
        return jax.tree.unflatten(jax.tree.structure(results), run(*jax.tree.leaves(arguments)))

    return folded


def _folded_in(parameter: Any) -> Any:
    """Returns a parameter of an equation; if it is a program, with its transposes folded."""
    if isinstance(parameter, core.ClosedJaxpr):
        return core.ClosedJaxpr(_folded_in(parameter.jaxpr), parameter.consts)
    if not isinstance(parameter, core.Jaxpr):
        return parameter
    uses = Counter(map(id, parameter.outvars))
    uses.update(id(variable) for equation in parameter.eqns for variable in equation.invars)
    products = {
        id(equation.outvars[0]): equation
        for equation in parameter.eqns
        if equation.primitive is primitives.dot_general_p and uses[id(equation.outvars[0])] == 1
    }
    pairs = {
        id(equation): products[id(equation.invars[0])]
        for equation in parameter.eqns
        if equation.primitive is primitives.transpose_p
        and id(equation.invars[0]) in products
        and _exchanges_operands(equation, products[id(equation.invars[0])])
    }
    replaced = set(map(id, pairs.values()))
    equations: list[Any] = []
    for equation in parameter.eqns:
        if id(equation) in pairs:
            equations.append(_with_operands_exchanged(pairs[id(equation)], equation.outvars))
        elif id(equation) not in replaced:
            inner = {name: _folded_in(value) for name, value in equation.params.items()}
            equations.append(equation.replace(params=inner))
    return parameter.replace(eqns=equations)


def _exchanges_operands(transpose: Any, product: Any) -> bool:
    """Returns whether a transpose exchanges the axes of a product of two matrices."""
    are_matrices = all(operand.aval.ndim == 2 for operand in product.invars)
    return are_matrices and tuple(transpose.params["permutation"]) == (1, 0)


def _with_operands_exchanged(product: Any, results: Any) -> Any:
    (first, second), batch = product.params["dimension_numbers"]
    precision = product.params["precision"]
    exchanged = {
        "dimension_numbers": ((second, first), batch),
        "precision": precision[::-1] if isinstance(precision, tuple) else precision,
    }
    return product.replace(
        invars=product.invars[::-1], outvars=results, params=product.params | exchanged
    )
