"""One compiled executable of a program: what it takes and returns, and how it is run."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import jax

from kerasdist import keras_compat
from kerasdist.backends.jax.fit import donation
from kerasdist.backends.jax.loops import components, scopes
from kerasdist.backends.jax.loops.values import (
    Padded,
    Stacked,
    flatten,
    is_distributed,
    joined,
    rebuilt,
)
from kerasdist.backends.jax.mesh.arrays import here, is_array
from kerasdist.backends.jax.mesh.placement import Placement

if TYPE_CHECKING:
    import keras


class Incomplete(Exception):  # noqa: N818  it is no error: a new executable follows
    """A program turned out to need more variables than it was given.

    Attributes:
        variables: Those variables, by their ids.
    """

    def __init__(self, variables: dict[int, keras.Variable]) -> None:
        super().__init__()
        self.variables = variables


@dataclass
class Executable:
    """A program, compiled for some arguments.

    It keeps no variable alive: with one of them it is of no use any more.

    Attributes:
        known: The variables that are its inputs, by their ids.
        consumed: How many of the known variables it writes; they come first, and it consumes their
            arrays.
        held: The ids of the known variables of which replicas hold components.
        place: Where it runs; None: where its arguments are.
        compiled: The compiled function.
        traced: The function that JAX traces, set only during a call: it refers to the user's
            function and arguments, which this object must not keep alive.
        written: The ids of the variables whose new values it returns, as tracing found them.
        written_apart: The ids of the written variables of which it returns components.
        form: How to rebuild the results from the arrays that it returns.
        digest: A digest of the program, where several workers compare theirs.
    """

    known: dict[int, weakref.ref[keras.Variable]]
    consumed: int
    held: list[int]
    place: Placement | None
    compiled: Callable[..., Any] | None = None
    traced: Callable[..., Any] | None = None
    written: list[int] = field(default_factory=list)
    written_apart: list[int] = field(default_factory=list)
    form: _Form | None = None
    digest: str = ""

    def variables(self) -> dict[int, keras.Variable]:
        """Returns the known variables, by their ids."""
        return {key: reference() for key, reference in self.known.items()}


@dataclass(frozen=True)
class _Form:
    """How to rebuild a program's results from the arrays that it returns.

    Attributes:
        structure: The structure of the results' pytree.
        constants: The leaves of the pytree, None in place of each array.
        whole: For each array that is whole on every device: the index of its leaf, and the function
            that makes the leaf from it.
        sharded: Likewise for arrays with a shard on each device.
    """

    structure: Any
    constants: list[Any]
    whole: list[tuple[int, Callable[[Any], Any]]]
    sharded: list[tuple[int, Callable[[Any], Any]]]

    def together(self, whole: Sequence[Any], sharded: Sequence[Any]) -> Any:
        """Rebuilds the program's results from the arrays that it returned."""
        leaves = list(self.constants)
        pairs = zip([*self.whole, *self.sharded], [*whole, *sharded], strict=True)
        for (index, made), array in pairs:
            leaves[index] = made(array)
        return jax.tree.unflatten(self.structure, leaves)


def launch(
    executable: Executable, traced: Callable[..., Any], arrays: Sequence[Any]
) -> tuple[Any, ...]:
    """Starts an executable, and gives the variables their new values. Returns its outputs."""
    place = executable.place
    compiled = executable.compiled or _compile(executable)
    if place is not None:
        place.begin_step()
    variables = executable.variables()
    arguments = _arguments(executable, variables, arrays)
    results: list[Any] = []
    executable.traced = traced
    try:
        if executable.compiled is None and place is not None:
            executable.digest = place.compare(compiled, *arguments)
        executable.compiled = compiled
        if executable.digest and place is not None:
            place.record(executable.digest[:12])
        # In one call of C code: Python raises KeyboardInterrupt between its own instructions
        # only, so not after the old values are consumed and before the new ones are kept.
        results.extend(map(compiled, *([one] for one in arguments)))
    finally:
        executable.traced = None
        if results:
            _store(executable, [variables[key] for key in executable.written], results[0][0])
    for key, stack in zip(executable.written_apart, results[0][1], strict=True):
        aggregate = keras_compat.stored_value(variables[key])
        components.remember(variables[key], components.Components(stack, aggregate))
    return results[0]


def finish(executable: Executable, outputs: tuple[Any, ...]) -> Any:
    """Returns the results of a launched executable; may wait for the devices."""
    new, _, whole, sharded = outputs
    if executable.place is not None:
        executable.place.after_launch((whole, sharded), new)
    assert executable.form is not None
    return executable.form.together(whole, sharded)


def _arguments(
    executable: Executable, known: dict[int, keras.Variable], arrays: Sequence[Any]
) -> tuple[Any, ...]:
    """Returns the arguments of the compiled function."""
    place, count = executable.place, executable.consumed
    variables = list(known.values())
    values = keras_compat.stored_values(variables)
    values[:count] = donation.consumable(variables[:count], values[:count])
    if place is None:
        values = list(map(here, values))
        return values[:count], values[count:], [], arrays
    on_mesh = place.enter(values, variables)
    if on_mesh is not values and place.keeps_state:
        keras_compat.store_values(variables[count:], on_mesh[count:])
    values = on_mesh
    stacks = [components.stack_on(known[key], place) for key in executable.held]
    return values[:count], values[count:], stacks, list(map(place.argument, arrays))


def _store(executable: Executable, variables: list[keras.Variable], new: list[jax.Array]) -> None:
    """Gives the variables their new values."""
    if executable.place is not None:
        new = executable.place.leave(new)
    keras_compat.store_values(variables, new)
    donation.mark_unread(variables, new)


def _compile(executable: Executable) -> Callable[..., Any]:
    def program(
        consumed: Sequence[Any], kept: Sequence[Any], stacks: Sequence[Any], arrays: Sequence[Any]
    ) -> Any:
        traced, known = executable.traced, executable.variables()
        assert traced is not None
        held = dict(zip(executable.held, stacks, strict=False))  # without a mesh `stacks` is empty
        scope = scopes.ProgramScope(known, [*consumed, *kept], held)
        with scope:
            whole, sharded, executable.form = _leaving(traced(arrays), executable.place)
        if scope.variables:
            raise Incomplete(scope.variables)
        # Every variable whose array is consumed needs a new one, even if this trace writes none.
        first = dict(itertools.islice(known.items(), executable.consumed))
        written = {**first, **scope.written}
        apart = {key: v for key, v in written.items() if scope.written_stack(v) is not None}
        executable.written, executable.written_apart = list(written), list(apart)
        new = [scope.peek(variable) for variable in written.values()]
        if executable.place is not None:
            new = executable.place.constrained(new, list(written.values()))
        return new, [scope.written_stack(one) for one in apart.values()], whole, sharded

    place = executable.place
    if place is None:
        return jax.jit(program, donate_argnums=0)
    variables = None if place.layout.shards_state else place.whole  # None: as constrained
    shardings = variables, place.rows, place.whole, place.rows
    return jax.jit(program, donate_argnums=0, out_shardings=shardings)


def _leaving(results: object, place: Placement | None) -> tuple[list[Any], list[Any], _Form]:
    """Splits results into whole arrays, sharded arrays, and the form to rebuild them."""
    leaves, structure = flatten(results)
    whole: list[Any] = []
    sharded: list[Any] = []
    form = _Form(structure, leaves, [], [])
    for index, leaf in enumerate(leaves):
        if is_array(leaf):
            whole.append(leaf)
            form.whole.append((index, here))
            leaves[index] = None
        elif is_distributed(leaf) and (source := joined(leaf)) is not None:
            by_replica = isinstance(source, Stacked | Padded)
            (sharded if by_replica else whole).append(source.array)
            again = partial(rebuilt, type(leaf), type(source), source.layout)
            (form.sharded if by_replica else form.whole).append((index, again))
            leaves[index] = None
    return whole, sharded, form
