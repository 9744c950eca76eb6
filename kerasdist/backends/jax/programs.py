"""Functions compiled with the Keras variables they use as inputs and outputs.

A function is traced once without values, which finds the variables it reads and writes and gives
those it creates the time to get their first values. Then it is compiled: the variables enter with
its arguments, those it writes are consumed and come out anew.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MethodType
from typing import Any, final

import jax
import keras
import numpy as np
from jax import numpy as jnp

from kerasdist import context, keras_seam
from kerasdist.backends.jax import components, scopes
from kerasdist.backends.jax.placement import MeshPlacement
from kerasdist.backends.jax.sources import (
    Padded,
    Stacked,
    flatten,
    is_array,
    is_distributed,
    is_traced,
    joined,
)
from kerasdist.errors import ScopeError

# Compiled versions that a function keeps, for shapes of arguments and for constants.
_VERSIONS = 128
# How often a function is traced until it creates no variable any more.
_TRACINGS = 4

# Values are taken out of variables, consumed and put back by one thread at a time.
_launching = threading.RLock()


class _Incomplete(Exception):  # noqa: N818  caught below
    """A program turned out to need more variables than it was given."""


@final
class Programs:
    """The programs of functions, for as long as the functions live."""

    def __init__(self) -> None:
        """Starts without programs."""
        self._of: dict[Hashable, tuple[Any, Program]] = {}

    def of(self, function: Callable[..., Any]) -> Program:
        """Returns the program of a function, the same for the same function.

        Args:
            function: A function, a bound method, or any callable.
        """
        # A method is a new object whenever it is asked for; what lives is the object it is of.
        owner = function.__self__ if isinstance(function, MethodType) else function
        code = function.__func__ if isinstance(function, MethodType) else None
        key = id(owner), id(code)
        known = self._of.get(key)
        if known is not None and known[0]() is owner:
            return known[1]
        try:
            reference: Any = weakref.ref(owner, lambda _: self._of.pop(key, None))
        except TypeError:  # a callable that cannot be referred to weakly lives as long as we do
            reference = partial(_same, owner)
        program = Program()
        self._of[key] = reference, program
        return program


def _same(owner: Any) -> Any:
    return owner


@dataclass
class _Version:
    """A program, compiled for some arguments.

    Attributes:
        known: The variables it is given, by their ids.
        held: Those of them of which replicas hold components.
        consumed: Those of them that it writes.
        kept: The others.
        place: The devices, None for the default device.
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
    place: MeshPlacement | None
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


@final
class Program:
    """A function that JAX compiles, once for each form of its arguments."""

    def __init__(self) -> None:
        """Starts without compiled versions."""
        self._versions: OrderedDict[Hashable, _Version] = OrderedDict()

    def __call__(
        self, run: Callable[..., Any], function: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Calls ``run(function, *args, **kwargs)``, compiled.

        Args:
            run: What to compile; the same for each call.
            function: Its first argument, which the program does not keep alive.
            args: Positional arguments.
            kwargs: Keyword arguments.
        """
        leaves, structure = flatten((args, kwargs))
        arrays: list[Any] = []
        makers: list[Any] = []
        forms: list[Hashable] = [structure, _surroundings()]
        for leaf in leaves:
            array, maker, form = _entering(leaf)
            forms.append(form)
            makers.append(maker)
            if maker is not None:
                arrays.append(array)

        def traced(arrays: Sequence[Any]) -> Any:
            remaining = iter(arrays)
            given = [
                leaf if maker is None else maker(next(remaining))
                for leaf, maker in zip(leaves, makers, strict=True)
            ]
            args, kwargs = jax.tree.unflatten(structure, given)
            return run(function, *args, **kwargs)

        key = tuple(forms)
        with _launching:
            version = self._versions.get(key)
            if version is None or _is_outdated(version):
                version = self._make(traced, arrays, version)
                pairs = zip(leaves, makers, strict=True)
                version.constants = [leaf for leaf, maker in pairs if maker is None]
                self._versions[key] = version
                if len(self._versions) > _VERSIONS:
                    self._versions.popitem(last=False)
            for _ in range(_TRACINGS):
                try:
                    return _launch(version, traced, arrays)
                except _Incomplete:
                    version = self._make(traced, arrays, version)
                    self._versions[key] = version
            raise _never_settles(version.known.values())

    def _make(
        self, traced: Callable[..., Any], arrays: Sequence[Any], before: _Version | None
    ) -> _Version:
        """Finds the variables of a function for some arguments; compiles nothing yet."""
        abstract = [_abstract(array) for array in arrays]
        for _ in range(_TRACINGS):
            scope = scopes.ProgramScope({}, (), {})
            try:
                jax.eval_shape(partial(_explore, traced, scope), abstract)
            finally:
                created = [v for v in scope.variables.values() if _is_new(v)]
                # Also if it failed: layers that were built think that they have variables.
                keras_seam.initialize_waiting_variables()
            if not created:
                break
        else:
            raise _never_settles(created)
        known, held = scope.variables, scope.apart
        if before is not None:
            known, held = {**before.known, **known}, {**before.held, **held}
        for key in components.diverged(known):
            if components.recall(known[key]) is not None:
                held = {**held, key: known[key]}
        return _Version(known, held, scope.written, scopes.mesh_of(scope), [])


def _is_new(variable: Any) -> bool:
    return keras_seam.stored_value(variable) is None


def _explore(traced: Callable[..., Any], scope: Any, arrays: Sequence[Any]) -> None:
    with scope:
        traced(arrays)


def _never_settles(variables: Any) -> ValueError:
    return ValueError(
        "Expected a function that creates its variables in its first call only. Received: new "
        f"variables in every call, such as {[v.path for v in variables][:3]}. Make them outside, "
        "or keep them where the next call finds them."
    )


def _surroundings() -> Hashable:
    """What a program depends on beside its arguments and variables."""
    return (
        id(context.scoped_strategy()),
        keras.config.dtype_policy().name,
        keras.config.floatx(),
        keras_seam.stateless_scope() is None,
    )


def _entering(leaf: Any) -> tuple[Any, Callable[[Any], Any] | None, Hashable]:
    """Returns how an argument enters: its array, what to make of that, and what is compiled for."""
    if isinstance(leaf, jax.Array):
        if is_traced(leaf):
            raise ScopeError(
                "Expected arrays. Received: a value that JAX is tracing, in a call of strategy.run "
                "or of a kerasdist.function. Use kerasdist.function instead of jax.jit around it, "
                "and kerasdist.value_and_grad instead of jax.grad."
            )
        return leaf, _itself, (leaf.shape, leaf.dtype, leaf.weak_type)
    if isinstance(leaf, np.ndarray | np.generic):
        return leaf, _itself, (leaf.shape, leaf.dtype)
    if is_distributed(leaf):
        source = joined(leaf, len(leaf.source))
        if source is None:
            return None, None, (type(leaf), id(leaf))  # if a program needs it, that will be said
        kind, array, layout = type(source), source.array, source.layout
        form = (type(leaf), kind, layout, array.shape, array.dtype)
        return array, partial(_distributed, type(leaf), kind, layout), form
    if not isinstance(leaf, keras.Variable) and hasattr(leaf, "__array__"):
        array = np.asarray(leaf)  # of another framework, say a batch of tf.data
        return array, _itself, (array.shape, array.dtype)
    try:
        hash(leaf)
    except TypeError:
        return None, None, (type(leaf), id(leaf))
    return None, None, (type(leaf), leaf)


def _itself(array: Any) -> Any:
    return array


def _distributed(value: Any, kind: Any, layout: Any, array: Any) -> Any:
    return value(kind(array, layout))


def _abstract(array: Any) -> Any:
    weak = isinstance(array, jax.Array) and array.weak_type
    return jax.ShapeDtypeStruct(array.shape, jnp.result_type(array), weak_type=weak)


def _is_outdated(version: _Version) -> bool:
    """Whether replicas hold components of a variable that were equal when it was compiled."""
    return version.place is not None and any(
        key not in version.held and components.recall(version.known[key]) is not None
        for key in components.diverged(version.known)
    )


def _compile(version: _Version) -> Callable[..., Any]:
    known, held = version.known, version.held

    def program(
        consumed: Sequence[Any], lost: Sequence[Any], kept: Sequence[Any], arrays: Sequence[Any]
    ) -> Any:
        traced, (stacks, arrays) = version.traced, arrays
        assert traced is not None
        values = dict(zip(version.consumed, consumed, strict=True))
        rest = iter(kept)
        every = [values[key] if key in values else next(rest) for key in known]
        lost, stacks = iter(lost), iter(stacks)
        components = {key: next(lost if key in version.consumed else stacks) for key in held}
        scope = scopes.ProgramScope(known, every, components)
        with scope:
            whole, pieces, version.form = _leaving(traced(arrays))
        if scope.variables:
            version.known |= scope.variables
            version.consumed |= scope.written
            raise _Incomplete
        written = list({**version.consumed, **scope.written}.values())
        apart = [v for v in written if scope.written_stack(v) is not None]
        version.returned, version.returned_apart = written, apart
        new = [scope.peek(variable) for variable in written]
        if version.place is not None:
            new = version.place.constrained(new, written)
        return whole, pieces, new, [scope.written_stack(variable) for variable in apart]

    place = version.place
    if place is None:
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
            form.whole.append((index, _itself))
        elif is_distributed(leaf):
            source = joined(leaf, len(leaf.source))
            if source is None:
                continue
            divided = isinstance(source, Stacked | Padded)
            (pieces if divided else whole).append(source.array)
            (form.pieces if divided else form.whole).append(
                (index, partial(_distributed, type(leaf), type(source), source.layout))
            )
        else:
            continue
        leaves[index] = None
    return whole, pieces, form


def _launch(version: _Version, traced: Callable[..., Any], arrays: Sequence[Any]) -> Any:
    """Runs a version, and gives the variables their new values."""
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
    if place is not None:
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
        whole, pieces, new, apart = compiled(consumed, lost, kept, (stacks, arrays))
    finally:
        version.traced = None
    kept_new = new if place is None else place.at_rest(new)
    for variable, value in zip(version.returned, kept_new, strict=True):
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
