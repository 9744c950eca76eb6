"""Compiles functions with the Keras variables that they use as inputs and outputs.

A function is first traced abstractly, which finds the variables that it reads and writes; variables
that it creates then get their initial values. Then it is compiled: the variables' values are inputs
beside the arguments, and the new values of written variables are outputs beside the results.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any, Generic, TypeVar, final

import jax
import keras
import numpy as np
from jax import numpy as jnp

from kerasdist import keras_compat
from kerasdist.backends.jax.fit import donation
from kerasdist.backends.jax.loops import components, scopes
from kerasdist.backends.jax.loops.executable import Executable, Incomplete, finish, launch
from kerasdist.backends.jax.loops.values import flatten, is_distributed, itself, joined, rebuilt
from kerasdist.backends.jax.mesh.arrays import is_array, is_traced
from kerasdist.core import context
from kerasdist.errors import ScopeError

# How many compiled versions a function keeps, for different shapes of arguments and constants.
_VERSIONS = 128
# Of which functions may see equal ones, in place of the same.
_VALUES = (bool, int, float, complex, str, bytes, type(None))
# How often a function is traced at most, until it creates no more variables.
_TRACINGS = 4


_Value = TypeVar("_Value")


@final
class _Kept(Generic[_Value]):
    """The values that were used last, by key; each only as long as certain objects live."""

    def __init__(self) -> None:
        """Starts empty."""
        self._entries: OrderedDict[Hashable, tuple[_Value, list[weakref.ref[Any]]]] = OrderedDict()

    def get(self, key: Hashable) -> _Value | None:
        """Returns the value of a key, None if there is none."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        return entry[0]

    def put(self, key: Hashable, value: _Value, objects: Iterable[Any]) -> None:
        """Keeps a value until one of the objects is gone."""

        def forget(_: object) -> None:
            self._entries.pop(key, None)

        self._entries[key] = value, [weakref.ref(one, forget) for one in objects]
        self._entries.move_to_end(key)
        if len(self._entries) > _VERSIONS:
            self._entries.popitem(last=False)


@final
class Programs:
    """The programs of functions, for as long as the functions live.

    Functions of one code that see the same objects, such as a lambda in a loop, share a program.
    """

    def __init__(self) -> None:
        """Starts without programs."""
        self._of: dict[Hashable, tuple[Any, Program]] = {}
        self._alike: _Kept[Program] = _Kept()

    def of(self, function: Callable[..., Any]) -> Program:
        """Returns the program of a function, always the same one for one function."""
        # Every access to a method makes a new object, so its instance and function are the key.
        owner = function.__self__ if isinstance(function, MethodType) else function
        code = function.__func__ if isinstance(function, MethodType) else None
        key = id(owner), id(code)
        known = self._of.get(key)
        if known is not None and known[0]() is owner:
            return known[1]
        try:
            reference: Any = weakref.ref(owner, lambda _: self._of.pop(key, None))
        except TypeError:  # without weak references the callable lives as long as this object
            reference = partial(_same, owner)
        program = self._alike_or_new(function)
        self._of[key] = reference, program
        return program

    def _alike_or_new(self, function: Callable[..., Any]) -> Program:
        if not isinstance(function, FunctionType):
            return Program()
        code = function.__code__
        cells = [cell.cell_contents for cell in function.__closure__ or () if not _is_empty(cell)]
        defaults = function.__defaults__ or (), function.__kwdefaults__ or {}
        seen = [*cells, *defaults[0], *defaults[1].values()]
        objects = [one for one in seen if type(one) not in _VALUES]
        if not all(type(one).__weakrefoffset__ for one in objects):
            return Program()  # such as a list: it may be another one later, in the same place
        known_by = [_constant(one) if type(one) in _VALUES else id(one) for one in seen]
        key = code, id(function.__globals__), len(cells), tuple(known_by), tuple(defaults[1])
        program = self._alike.get(key)
        if program is None:
            program = Program()
            self._alike.put(key, program, objects)
        return program


def _is_empty(cell: CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018  it raises
    except ValueError:
        return True
    return False


def _same(owner: object) -> Any:
    return owner


@final
class Program:
    """A function that JAX compiles, once for each form of its arguments."""

    def __init__(self) -> None:
        """Starts without compiled versions."""
        self._executables: _Kept[Executable] = _Kept()
        self._lock = threading.RLock()

    def __call__(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Calls ``function(*args, **kwargs)``, compiled."""
        arguments = _Arguments((args, kwargs))
        arrays = arguments.arrays

        def traced(arrays: Sequence[Any]) -> Any:
            args, kwargs = arguments.inside(arrays)
            return function(*args, **kwargs)

        key = arguments.form, id(context.scoped_strategy()), keras_compat.settings()
        with self._lock:
            executable = self._executables.get(key)
            if executable is None or _is_outdated(executable):
                executable = self._make(traced, arguments, executable, {}, key)
            for _ in range(_TRACINGS):
                try:
                    # Code on the host, for which the launch may wait, may call other functions.
                    with donation.passing(executable.known):
                        outputs = launch(executable, traced, arrays)
                    break
                except Incomplete as found:
                    executable = self._make(traced, arguments, executable, found.variables, key)
            else:
                raise _never_settles(executable.variables().values())
        return finish(executable, outputs)

    def _make(
        self,
        traced: Callable[..., Any],
        arguments: _Arguments,
        before: Executable | None,
        found: dict[int, keras.Variable],
        key: Hashable,
    ) -> Executable:
        """Finds the variables of a function for some arguments; compiles nothing yet."""
        abstract = [_abstract(array) for array in arguments.arrays]
        for _ in range(_TRACINGS):
            scope = scopes.ProgramScope({}, (), {})
            try:
                jax.eval_shape(partial(_explore, traced, scope), abstract)
            finally:
                created = [
                    v for v in scope.variables.values() if keras_compat.stored_value(v) is None
                ]
                # Also after a failure, since the layers that were built keep their variables.
                keras_compat.initialize_waiting_variables()
            if not created:
                break
        else:
            raise _never_settles(created)
        known, held, written = scope.variables, scope.apart, scope.written
        if before is not None:
            earlier = before.variables()
            held = {**{key: earlier[key] for key in before.held}, **held}
            written = {**dict(itertools.islice(earlier.items(), before.consumed)), **written}
            known = {**earlier, **found, **known}
        for one in components.diverged(known):
            if components.recall(known[one]) is not None:
                held = {**held, one: known[one]}
        consumed = {one: variable for one, variable in written.items() if one not in held}
        known = {**consumed, **known}
        executable = Executable(
            {one: weakref.ref(variable) for one, variable in known.items()},
            len(consumed),
            list(held),
            scopes.place_of(scope),
        )
        self._executables.put(key, executable, [*known.values(), *arguments.objects])
        return executable


@final
class _Arguments:
    """The arguments of one call of a program.

    Attributes:
        arrays: The arrays among them, which are the program's inputs.
        objects: Those of the other arguments, which are compiled in, that are known by identity.
        form: The key of the compiled version: structure, shapes, types and constants.
    """

    def __init__(self, structure: Any) -> None:
        self._leaves, self._structure = flatten(structure)
        self.arrays: list[Any] = []
        self.objects: list[Any] = []
        # For each leaf, the function that makes it from an array inside the program; None: the leaf
        # is a constant.
        self._made: list[Callable[[Any], Any] | None] = []
        self.form: Hashable = self._structure, *map(self._entered, self._leaves)

    def inside(self, arrays: Sequence[Any]) -> Any:
        """Rebuilds the arguments from the program's inputs, inside the program."""
        rest = iter(arrays)
        pairs = zip(self._leaves, self._made, strict=True)
        leaves = [leaf if made is None else made(next(rest)) for leaf, made in pairs]
        return jax.tree.unflatten(self._structure, leaves)

    def _entered(self, leaf: Any) -> Hashable:
        """Adds a leaf to the arrays or the constants; returns its part of `form`."""
        if is_distributed(leaf):
            source = joined(leaf)
            if source is None:  # of unequal components: a program that reads it raises (`unlike`)
                return self._constant(leaf)
            kind = type(leaf), type(source), source.layout
            return kind, self._array(source.array, partial(rebuilt, *kind))
        if is_traced(leaf):
            raise ScopeError(
                "Expected arrays. Received: a value that JAX is tracing, in a call of "
                "strategy.run or of a kerasdist.function. Use kerasdist.function instead of "
                "jax.jit around it, and kerasdist.value_and_grad instead of jax.grad."
            )
        if is_array(leaf):
            return self._array(leaf, itself)
        if not isinstance(leaf, keras.Variable) and hasattr(leaf, "__array__"):
            return self._array(np.asarray(leaf), itself)  # another framework's: a batch of tf.data
        return self._constant(leaf)

    def _array(self, array: Any, made: Callable[[Any], Any]) -> Hashable:
        self.arrays.append(array)
        self._made.append(made)
        return array.shape, array.dtype, getattr(array, "weak_type", False)

    def _constant(self, leaf: Any) -> Hashable:
        self._made.append(None)
        if type(leaf).__weakrefoffset__ and type(leaf).__hash__ in (None, object.__hash__):
            self.objects.append(leaf)
            return type(leaf), id(leaf)
        return _constant(leaf)


def _constant(leaf: object) -> Hashable:
    """Returns a key that is the same for equal constants of one type; it may keep them alive."""
    if isinstance(leaf, float | complex):
        return type(leaf), repr(leaf)  # 0.0 equals -0.0, and NaN nothing
    try:
        hash(leaf)
    except TypeError:
        return type(leaf), _ById(leaf)
    return type(leaf), leaf


@final
class _ById:
    """An object that is equal to itself alone, and lives as long as a key with it."""

    def __init__(self, one: Any) -> None:
        self._one = one

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ById) and other._one is self._one

    def __hash__(self) -> int:
        return id(self._one)


def _explore(traced: Callable[..., Any], scope: scopes.ProgramScope, arrays: Sequence[Any]) -> None:
    with scope:
        traced(arrays)


def _never_settles(variables: Iterable[keras.Variable]) -> ValueError:
    return ValueError(
        "Expected a function that creates its variables in its first call only. Received: new "
        f"variables in every call, such as {[v.path for v in variables][:3]}. Make them outside, "
        "or keep them where the next call finds them."
    )


def _abstract(array: Any) -> Any:
    weak = isinstance(array, jax.Array) and array.weak_type
    return jax.ShapeDtypeStruct(array.shape, jnp.result_type(array), weak_type=weak)


def _is_outdated(executable: Executable) -> bool:
    """Whether a variable has components now and had none when the executable was compiled."""
    diverged = components.diverged(executable.known)
    if not diverged or executable.place is None:
        return False
    variables = executable.variables()
    return any(
        key not in executable.held and components.recall(variables[key]) is not None
        for key in diverged
    )
