"""One compiled executable of a program: what it takes and returns, and how it is run."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any, final

import jax
import keras

from kerasdist import keras_compat
from kerasdist.backends.jax.fit import donation
from kerasdist.backends.jax.loops import components, scopes
from kerasdist.backends.jax.loops.values import (
    Stacked,
    in_one_array,
    is_distributed,
    map_values,
)
from kerasdist.backends.jax.mesh.arrays import here, is_array
from kerasdist.backends.jax.mesh.placement import Placement


class Incomplete(Exception):  # noqa: N818  it is no error: a new executable follows
    """A program turned out to need more than it was given: variables, or a mesh.

    Attributes:
        scope: The scope of its trace.
    """

    def __init__(self, scope: scopes.ProgramScope) -> None:
        super().__init__()
        self.scope = scope


@final
class Executable:
    """A program, compiled for some arguments when it is first launched.

    It keeps no variable alive: with one of them it is of no use any more.

    Attributes:
        known: The variables that are its inputs, by their ids.
        held: The ids of the known variables of which replicas hold components.
        place: Where it runs; None: where its arguments are.
    """

    def __init__(
        self,
        consumed: dict[int, keras.Variable],
        others: dict[int, keras.Variable],
        held: Sequence[int],
        place: Placement | None,
    ) -> None:
        """Takes the variables that it writes, whose arrays it consumes, and the other ones."""
        variables = {**consumed, **others}
        self.known = {one: weakref.ref(variable) for one, variable in variables.items()}
        self.held = held
        self.place = place
        self._consumed = len(consumed)
        # The function that JAX traces, set only during a call: it refers to the user's function and
        # arguments, which this object must not keep alive.
        self._traced: Callable[..., Any] | None = None
        # As tracing found them: the ids of the variables whose new values it returns, of those of
        # which it returns components, and what is no array of the results, with their structure.
        self._written: list[int] = []
        self._written_apart: list[int] = []
        self._constants: list[Any] = []
        self._structure: Any = None
        self._digest: str | None = None  # where several workers compare their programs

    def variables(self) -> dict[int, Any]:
        """Returns the known variables, by their ids."""
        return {key: reference() for key, reference in self.known.items()}

    def is_outdated(self) -> bool:
        """Returns whether a variable has components that it had not when this was made."""
        diverged = set(components.diverged(self.known)).difference(self.held)
        return self.place is not None and any(
            components.recall(self.variables()[key]) is not None for key in diverged
        )

    def extended(self, scope: scopes.ProgramScope | None) -> Executable:
        """Returns one with the variables, and on the mesh, that a trace has found."""
        known = self.variables()
        consumed = dict(list(known.items())[: self._consumed])
        held = {*self.held}
        place = self.place
        if scope is not None:
            known |= scope.variables
            consumed |= scope.written
            held.update(scope.apart)
            place = scopes.place_of(scope)
        held.update(
            one for one in components.diverged(known) if components.recall(known[one]) is not None
        )
        consumed = {one: variable for one, variable in consumed.items() if one not in held}
        return Executable(consumed, known, [one for one in known if one in held], place)

    def launch(self, traced: Callable[..., Any], arrays: Sequence[Any]) -> tuple[Any, ...]:
        """Starts it, and gives the variables their new values. Returns its outputs."""
        if self.place is not None:
            self.place.begin_step()
        variables = self.variables()
        arguments = self._arguments(variables, arrays)
        results: list[Any] = []
        self._traced = traced
        try:
            if self.place is not None:
                if self._digest is None:
                    self._digest = self.place.compare(self._compiled, *arguments)
                self.place.record(self._digest[:12])
            # In one call of C code: Python raises KeyboardInterrupt between its own instructions
            # only, so not after the old values are consumed and before the new ones are kept.
            results.extend(map(self._compiled, *([one] for one in arguments)))
        finally:
            self._traced = None
            if results:
                written, new = [variables[key] for key in self._written], results[0][0]
                if self.place is not None:
                    new = self.place.leave(new)
                keras_compat.store_values(written, new)
                donation.mark_unread(written, new)
        for key, stack in zip(self._written_apart, results[0][1], strict=True):
            aggregate = keras_compat.stored_value(variables[key])
            components.remember(variables[key], components.Components(stack, aggregate))
        return results[0]

    def finish(self, outputs: tuple[Any, ...]) -> Any:
        """Returns the results of a launch; may wait for the devices."""
        new, _, found = outputs
        if self.place is not None:
            self.place.after_launch(found, new)
        arrays = iter(found)
        leaves = [next(arrays) if leaf is None else leaf for leaf in self._constants]
        results = jax.tree.unflatten(self._structure, leaves)
        return map_values(lambda leaf: leaf if is_distributed(leaf) else here(leaf), results)

    def _arguments(
        self, known: dict[int, keras.Variable], arrays: Sequence[Any]
    ) -> tuple[Any, ...]:
        """Returns the arguments of the compiled function."""
        place, count = self.place, self._consumed
        variables = list(known.values())
        values = keras_compat.stored_values(variables)
        values[:count] = donation.consumable(variables[:count], values[:count])
        if place is None:
            values = list(map(here, values))
            return values[:count], values[count:], [], arrays
        on_mesh = place.enter(values, variables)
        if on_mesh is not values and place.keeps_state:
            keras_compat.store_values(variables[count:], on_mesh[count:])
        stacks = [components.stack_on(known[key], place) for key in self.held]
        return on_mesh[:count], on_mesh[count:], stacks, list(map(place.argument, arrays))

    @cached_property
    def _compiled(self) -> Callable[..., Any]:
        place = self.place
        if place is None:
            return jax.jit(self._program, donate_argnums=0)
        variables = None if place.layout.shards_state else place.whole  # None: as constrained
        return jax.jit(self._program, donate_argnums=0, out_shardings=(variables, place.rows, None))

    def _program(
        self, consumed: Sequence[Any], kept: Sequence[Any], stacks: Sequence[Any], arrays: Any
    ) -> tuple[list[Any], list[Any], list[Any]]:
        """Is traced: returns variables' new values and components, and the arrays of results."""
        known, place = self.variables(), self.place
        assert self._traced is not None
        held = dict(zip(self.held, stacks, strict=False))  # without a mesh `stacks` is empty
        scope = scopes.ProgramScope(known, [*consumed, *kept], held)
        with scope:
            results = map_values(in_one_array, self._traced(arrays))
        if scope.variables or (place is None and scope.placements):
            raise Incomplete(scope)
        # Every variable whose array is consumed needs a new one, even if this trace writes none.
        written = {**dict(list(known.items())[: self._consumed]), **scope.written}
        apart = {key: v for key, v in written.items() if scope.written_stack(v) is not None}
        self._written, self._written_apart = list(written), list(apart)
        new = [scope.peek(variable) for variable in written.values()]
        if place is not None:
            new = place.constrained(new, list(written.values()))
            results = map_values(partial(_on_mesh, place), results)
        leaves, self._structure = jax.tree.flatten(results)
        self._constants = [None if is_array(leaf) else leaf for leaf in leaves]
        found = [leaf for leaf in leaves if is_array(leaf)]
        return new, [scope.written_stack(one) for one in apart.values()], found


def _on_mesh(place: Placement, result: Any) -> Any:
    """Constrains where the arrays of a result are: replicas' components on the replicas."""
    is_sharded = is_distributed(result) and isinstance(result.source, Stacked)
    sharding = place.rows if is_sharded else place.whole
    return jax.tree.map(
        lambda leaf: jax.lax.with_sharding_constraint(leaf, sharding) if is_array(leaf) else leaf,
        result,
    )
