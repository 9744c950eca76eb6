"""One compiled version of a program: what it takes and returns, and how it is run."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
from jax import numpy as jnp

from kerasdist import keras_seam
from kerasdist.backends.jax import components, scopes
from kerasdist.backends.jax.arrays import is_array
from kerasdist.backends.jax.placement import MeshPlacement, Placement
from kerasdist.backends.jax.sources import (
    Padded,
    Stacked,
    flatten,
    is_distributed,
    itself,
    joined,
    rebuilt,
)


class Incomplete(Exception):  # noqa: N818  it is no error: a new version follows
    """A program turned out to need more variables than it was given."""


@dataclass
class Version:
    """A program, compiled for some arguments.

    Attributes:
        known: The variables it is given, by their ids.
        held: Those of them of which replicas hold components.
        consumed: Those of them that it writes.
        kept: The others.
        place: Where it runs, None for the default device.
        constants: Arguments that are compiled in.
        launched: Calls the compiled function where it runs.
        traced: What it calls when JAX traces it; only there during a call, since it has the user's
            function and arguments, which must not live as long as what is compiled.
        returned: The variables whose values it returns, as tracing found them.
        form: How to put the results together.
    """

    known: dict[int, Any]
    held: dict[int, Any]
    consumed: dict[int, Any]
    place: Placement | None
    constants: list[Any]
    launched: Callable[..., Any] | None = None
    traced: Callable[..., Any] | None = None
    kept: list[Any] = field(default_factory=list)
    returned: list[Any] = field(default_factory=list)
    returned_apart: list[Any] = field(default_factory=list)
    form: _Form | None = None


@dataclass(frozen=True)
class _Form:
    """How to put results together.

    Attributes:
        structure: The pytree.
        constants: Its leaves, where they are constants.
        whole: Where the arrays stand among the leaves, and what they are components of.
        pieces: Likewise for arrays with a piece on each device.
        is_sole: Whether the result is one array.
    """

    structure: Any
    constants: list[Any]
    whole: list[tuple[int, Callable[[Any], Any]]]
    pieces: list[tuple[int, Callable[[Any], Any]]]
    is_sole: bool

    def together(self, whole: Sequence[Any], pieces: Sequence[Any]) -> Any:
        """Returns the results.

        Args:
            whole: Arrays.
            pieces: Arrays with a piece on each device.
        """
        if self.is_sole:
            return self.whole[0][1](whole[0])
        leaves = list(self.constants)
        for (index, made), array in zip(self.whole, whole, strict=True):
            leaves[index] = made(array)
        for (index, made), array in zip(self.pieces, pieces, strict=True):
            leaves[index] = made(array)
        return jax.tree.unflatten(self.structure, leaves)


def launch(version: Version, traced: Callable[..., Any], arrays: Sequence[Any]) -> Any:
    """Runs a version, and gives the variables their new values.

    Args:
        version: The version; it is compiled if it is not yet.
        traced: What to trace then.
        arrays: The arrays that it takes.

    Raises:
        Incomplete: If it needs more variables than it was given; it has noted them.
    """
    if version.launched is None:
        version.kept = [v for key, v in version.known.items() if key not in version.consumed]
        on_mesh = isinstance(version.place, MeshPlacement)
        version.launched = partial(
            _on_mesh if on_mesh else _on_one_device, version, _compile(version)
        )
    if version.place is not None:
        version.place.begin_step()
    consumed = keras_seam.stored_values(version.consumed.values())
    if max(map(sys.getrefcount, consumed), default=0) > _UNSHARED:
        # Somebody else has one too, so it must live on.
        for index, count in enumerate(list(map(sys.getrefcount, consumed))):
            if count > _UNSHARED:
                consumed[index] = jnp.copy(consumed[index])
    kept = keras_seam.stored_values(version.kept)
    version.traced = traced
    try:
        new, apart, whole, pieces = version.launched(consumed, kept, arrays)
    finally:
        version.traced = None
    keras_seam.store_values(version.returned, new)
    for variable, stack in zip(version.returned_apart, apart, strict=True):
        aggregate = keras_seam.stored_value(variable)
        components.remember(variable, components.Components(stack, aggregate))
    if version.place is not None:
        version.place.flow.after_launch((whole, pieces), new)
    assert version.form is not None
    return version.form.together(whole, pieces)


# What the compiled function takes: variables that it writes and their components; other variables;
# their components, and the arguments.
_Compiled = Callable[
    [Sequence[Any], Sequence[Any], Sequence[Any], tuple[Sequence[Any], Sequence[Any]]], Any
]


def _on_one_device(
    version: Version,
    compiled: _Compiled,
    consumed: Sequence[Any],
    kept: Sequence[Any],
    arrays: Sequence[Any],
) -> Any:
    with contextlib.nullcontext() if version.place is None else version.place.variables():
        return compiled(consumed, [], kept, ([], arrays))


def _on_mesh(
    version: Version,
    compiled: _Compiled,
    consumed: list[Any],
    kept: list[Any],
    arrays: Sequence[Any],
) -> Any:
    place = version.place
    assert isinstance(place, MeshPlacement)
    if not place.ready(consumed, kept):
        written = list(version.consumed.values())
        consumed = place.entered(place.settled(consumed, written), written)
        settled = place.settled(kept, version.kept)
        if settled is not kept:  # there they stay
            keras_seam.store_values(version.kept, settled)
        kept = place.entered(settled, version.kept)
    arrays = list(map(place.intake.argument, arrays))
    lost: list[Any] = []
    stacks: list[Any] = []
    for key, variable in version.held.items():
        (lost if key in version.consumed else stacks).append(components.stack_on(variable, place))
    new, apart, whole, pieces = compiled(consumed, lost, kept, (stacks, arrays))
    return place.rest.left(new), apart, whole, pieces


class _Holder:
    """Stands for a variable."""

    def __init__(self) -> None:
        self._value = object()


def _unshared() -> int:
    """How many references there are to a value that only its variable holds, where it is asked."""
    values = keras_seam.stored_values({0: _Holder()}.values())
    holders = [_Holder()]
    values = keras_seam.stored_values(dict(enumerate(holders)).values())
    return max(map(sys.getrefcount, values))


_UNSHARED = _unshared()


def _compile(version: Version) -> Callable[..., Any]:
    known, held = version.known, version.held

    def program(
        consumed: Sequence[Any], lost: Sequence[Any], kept: Sequence[Any], arrays: Sequence[Any]
    ) -> Any:
        traced, (stacks, arrays) = version.traced, arrays
        assert traced is not None
        values = dict(zip(version.consumed, consumed, strict=True))
        rest = iter(kept)
        every = [values[key] if key in values else next(rest) for key in known]
        first, others = iter(lost), iter(stacks)
        components = {key: next(first if key in version.consumed else others) for key in held}
        scope = scopes.ProgramScope(known, every, components)
        with scope:
            whole, pieces, version.form = _leaving(traced(arrays), version.place)
        if scope.variables:
            version.known |= scope.variables
            version.consumed |= scope.written
            raise Incomplete
        written = list({**version.consumed, **scope.written}.values())
        apart = [v for v in written if scope.written_stack(v) is not None]
        version.returned, version.returned_apart = written, apart
        new = [scope.peek(variable) for variable in written]
        if isinstance(version.place, MeshPlacement):
            new = version.place.constrained(new, written)
        # These first: XLA looks for an output of the size of each input that is consumed, and finds
        # the variable's own, not, say, the loss, whose way to there would be a copy.
        return new, [scope.written_stack(variable) for variable in apart], whole, pieces

    place = version.place
    if not isinstance(place, MeshPlacement):
        return jax.jit(program, donate_argnums=(0, 1))
    variables = None if place.layout.splits.rules else place.whole  # None: as the program says
    out = variables, place.pieces, place.whole, place.pieces
    return jax.jit(program, donate_argnums=(0, 1), out_shardings=out)


_LEAF = jax.tree.structure(0)


def _leaving(results: Any, place: Placement | None) -> tuple[list[Any], list[Any], _Form]:
    made = place.result if isinstance(place, MeshPlacement) else itself
    leaves, structure = flatten(results)
    whole: list[Any] = []
    pieces: list[Any] = []
    form = _Form(structure, leaves, [], [], structure == _LEAF and is_array(leaves[0]))
    for index, leaf in enumerate(leaves):
        if is_array(leaf):
            whole.append(leaf)
            form.whole.append((index, made))
        elif is_distributed(leaf):
            source = joined(leaf)
            if source is None:
                continue
            divided = isinstance(source, Stacked | Padded)
            (pieces if divided else whole).append(source.array)
            (form.pieces if divided else form.whole).append(
                (index, partial(rebuilt, type(leaf), type(source), source.layout))
            )
        else:
            continue
        leaves[index] = None
    return whole, pieces, form
