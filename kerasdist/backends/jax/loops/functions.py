"""`kerasdist.function` and `kerasdist.value_and_grad` on JAX."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import keras

from kerasdist import keras_compat
from kerasdist.backends.jax.fit import donation
from kerasdist.backends.jax.loops import replica_scope, scopes
from kerasdist.backends.jax.loops.function_cache import Program
from kerasdist.backends.jax.loops.replica_scope import Differentiated
from kerasdist.backends.jax.mesh import sharded_state
from kerasdist.backends.jax.mesh.arrays import here
from kerasdist.job.job import FUNCTION, translating_failures


def function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that JAX compiles together with the variables it uses."""
    program = Program()

    @functools.wraps(function)
    def compiled(*args: object, **kwargs: object) -> Any:
        if scopes.program() is not None:
            return function(*args, **kwargs)  # traced into the enclosing program
        with translating_failures(FUNCTION):
            return program(function, args, kwargs)

    return compiled


def value_and_grad(
    function: Callable[[], Any], variables: Sequence[keras.Variable], has_aux: bool
) -> tuple[Any, list[Any]]:
    """Returns a function's result and gradients; an `OverlayScope` gives it variables' values."""
    outer = scopes.current()
    by_key = {id(variable): variable for variable in variables}
    values = [_value(outer, variable) for variable in by_key.values()]

    def call(scope: scopes.OverlayScope) -> tuple[Any, Any, Any]:
        with scope:
            result = function()
        value, rest = result if has_aux else (result, None)
        updates = {key: scope.state_mapping[key] for key in scope.variables}
        parts = rest, updates, scope.stacks
        return keras.ops.convert_to_tensor(value), parts, scope

    def overlay(values: Sequence[Any], outer: scopes.Scope | None) -> scopes.OverlayScope:
        return scopes.OverlayScope(dict(zip(by_key, values, strict=True)), outer)

    def alone() -> Differentiated:
        notes: list[Any] = []

        def differentiated(values: list[Any]) -> tuple[Any, Any]:
            value, parts, note = call(overlay(values, outer))
            notes.append(note)
            return value, parts

        (value, parts), gradients = jax.value_and_grad(differentiated, has_aux=True)(values)
        return Differentiated(value, gradients, parts, notes[-1])

    replica = replica_scope.current()
    if replica is None:
        found = alone()
    else:
        found = replica.exchange.differentiated(replica, alone, (overlay, call), values)
    (rest, updates, stacks), scope = found.parts, found.notes
    if outer is None:
        keras_compat.initialize_waiting_variables()
    for key, variable in scope.variables.items():
        if outer is None:
            variable.assign(updates[key])
        else:
            outer.store(variable, updates[key], stacks.get(key))
    if outer is not None:
        for variable in scope.read.values():
            outer.get_current_value(variable)
    of = dict(zip(by_key, found.gradients, strict=True))
    gradients = [of[id(v)] if id(v) in scope.read else None for v in variables]
    return (found.value, rest) if has_aux else found.value, gradients


def _value(outer: scopes.Scope | None, variable: keras.Variable) -> Any:
    value = None if outer is None else outer.peek(variable)
    if value is None:
        donation.mark_read(variable)
        value = here(sharded_state.whole(variable, keras_compat.stored_value(variable)))
    return value
