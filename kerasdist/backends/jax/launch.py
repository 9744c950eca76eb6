"""One compiled version of a program: what it takes and returns, and how it is run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
from jax import numpy as jnp

from kerasdist import keras_seam
from kerasdist.backends.jax import components, scopes
from kerasdist.backends.jax.placement import MeshPlacement, OneDevicePlacement, Placement
from kerasdist.backends.jax.sources import (
    Padded,
    Stacked,
    flatten,
    is_array,
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
        compiled: The compiled function.
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
    compiled: Callable[..., Any] | None = None
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
    """

    structure: Any
    constants: list[Any]
    whole: list[tuple[int, Callable[[Any], Any]]]
    pieces: list[tuple[int, Callable[[Any], Any]]]

    def together(self, whole: Sequence[Any], pieces: Sequence[Any]) -> Any:
        """Returns the results.

        Args:
            whole: Arrays.
            pieces: Arrays with a piece on each device.
        """
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
    if version.compiled is None:
        version.kept = [v for key, v in version.known.items() if key not in version.consumed]
        version.compiled = _compile(version)
    compiled, place = version.compiled, version.place
    consumed = [keras_seam.stored_value(v) for v in version.consumed.values()]
    for index, count in enumerate(map(sys.getrefcount, consumed)):
        if count > _UNSHARED:  # somebody else has it too, so it must live on
            consumed[index] = jnp.copy(consumed[index])
    kept = [keras_seam.stored_value(v) for v in version.kept]
    lost: list[Any] = []
    stacks: list[Any] = []
    if isinstance(place, MeshPlacement):
        consumed = place.arrays(consumed, list(version.consumed.values()))
        placed = place.arrays(kept, version.kept)
        if placed is not kept and place.home is None:  # there they stay
            for variable, value in zip(version.kept, placed, strict=True):
                keras_seam.store_value(variable, value)
        kept = placed
        arrays = [_placed(array, place) for array in arrays]
        for key, variable in version.held.items():
            (lost if key in version.consumed else stacks).append(
                components.stack_on(variable, place)
            )
    version.traced = traced
    try:
        with place.variables() if isinstance(place, OneDevicePlacement) else nullcontext():
            whole, pieces, new, apart = compiled(consumed, lost, kept, (stacks, arrays))
    finally:
        version.traced = None
    resting = place.at_rest(new) if isinstance(place, MeshPlacement) else new
    for variable, value in zip(version.returned, resting, strict=True):
        keras_seam.store_value(variable, value)
    for variable, stack in zip(version.returned_apart, apart, strict=True):
        aggregate = keras_seam.stored_value(variable)
        components.remember(variable, components.Components(stack, aggregate))
    if place is not None:
        place.flow.after_launch((whole, pieces), new)
    assert version.form is not None
    return version.form.together(whole, pieces)


def _placed(array: Any, place: MeshPlacement) -> Any:
    """Returns an argument where the program takes it, moving only what is bound elsewhere."""
    if not isinstance(array, jax.Array) or not array.committed:
        return array
    if array.sharding in (place.whole, place.pieces):
        return array
    return jax.device_put(array, place.whole)


class _Holder:
    """Stands for a variable."""

    def __init__(self) -> None:
        self._value = object()


def _unshared() -> int:
    """How many references there are to a value that only its variable holds, where it is asked."""
    values = [keras_seam.stored_value(v) for v in {0: _Holder()}.values()]
    holders = [_Holder()]
    values = [keras_seam.stored_value(v) for v in dict(enumerate(holders)).values()]
    return next(iter(map(sys.getrefcount, values)))


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
            whole, pieces, version.form = _leaving(traced(arrays))
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
        return whole, pieces, new, [scope.written_stack(variable) for variable in apart]

    place = version.place
    if not isinstance(place, MeshPlacement):
        return jax.jit(program, donate_argnums=(0, 1))
    out = place.whole, place.pieces, None, place.pieces  # variables lie as the program says
    return jax.jit(program, donate_argnums=(0, 1), out_shardings=out)


def _leaving(results: Any) -> tuple[list[Any], list[Any], _Form]:
    leaves, structure = flatten(results)
    whole: list[Any] = []
    pieces: list[Any] = []
    form = _Form(structure, leaves, [], [])
    for index, leaf in enumerate(leaves):
        if is_array(leaf):
            whole.append(leaf)
            form.whole.append((index, itself))
        elif is_distributed(leaf):
            source = joined(leaf, len(leaf.source))
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
