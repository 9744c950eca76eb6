"""Compiles functions with the Keras variables that they use as inputs and outputs.

A function is first traced abstractly, which finds the variables that it reads and writes; variables
that it creates then get their initial values. Then it is compiled: the variables' values are inputs
beside the arguments, and the new values of written variables are outputs beside the results.
"""

from __future__ import annotations

import itertools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from types import MethodType
from typing import Any, final

import jax
import keras
import numpy as np
from jax import numpy as jnp

from kerasdist import context, keras_compat
from kerasdist.backends.jax import components, donation, scopes
from kerasdist.backends.jax.arrays import is_array, is_traced
from kerasdist.backends.jax.executable import Executable, Incomplete, launch
from kerasdist.backends.jax.placement import MeshPlacement
from kerasdist.backends.jax.values import flatten, is_distributed, itself, joined, rebuilt
from kerasdist.errors import ScopeError

# How many compiled versions a function keeps, for different shapes of arguments and constants.
_VERSIONS = 128
# How often a function is traced at most, until it creates no more variables.
_TRACINGS = 4


@final
class Programs:
    """The programs of functions, for as long as the functions live."""

    def __init__(self) -> None:
        """Starts without programs."""
        self._of: dict[Hashable, tuple[Any, Program]] = {}

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
        program = Program()
        self._of[key] = reference, program
        return program


def _same(owner: Any) -> Any:
    return owner


@final
class Program:
    """A function that JAX compiles, once for each form of its arguments."""

    def __init__(self) -> None:
        """Starts without compiled versions."""
        self._executables: OrderedDict[Hashable, Executable] = OrderedDict()

    def __call__(
        self, run: Callable[..., Any], function: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Calls ``run(function, *args, **kwargs)``, compiled."""
        arguments = _Arguments((args, kwargs))
        arrays = arguments.arrays

        def traced(arrays: Sequence[Any]) -> Any:
            args, kwargs = arguments.inside(arrays)
            return run(function, *args, **kwargs)

        key = arguments.form, id(context.scoped_strategy()), keras_compat.settings()
        with donation.launching:
            executable = self._executables.get(key)
            if executable is None or _is_outdated(executable):
                executable = self._make(traced, arguments, executable)
                self._executables[key] = executable
                if len(self._executables) > _VERSIONS:
                    self._executables.popitem(last=False)
            for _ in range(_TRACINGS):
                try:
                    return launch(executable, traced, arrays)
                except Incomplete:
                    executable = self._make(traced, arguments, executable)
                    self._executables[key] = executable
            raise _never_settles(executable.known.values())

    def _make(
        self, traced: Callable[..., Any], arguments: _Arguments, before: Executable | None
    ) -> Executable:
        """Finds the variables of a function for some arguments; compiles nothing yet."""
        abstract = [_abstract(array) for array in arguments.arrays]
        for _ in range(_TRACINGS):
            scope = scopes.ProgramScope({}, (), {})
            try:
                jax.eval_shape(partial(_explore, traced, scope), abstract)
            finally:
                created = [v for v in scope.variables.values() if _is_new(v)]
                # Also after a failure, since the layers that were built keep their variables.
                keras_compat.initialize_waiting_variables()
            if not created:
                break
        else:
            raise _never_settles(created)
        known, held, written = scope.variables, scope.apart, scope.written
        if before is not None:
            known, held = {**before.known, **known}, {**before.held, **held}
            written = {**dict(itertools.islice(before.known.items(), before.consumed)), **written}
        for key in components.diverged(known):
            if components.recall(known[key]) is not None:
                held = {**held, key: known[key]}
        consumed = {key: one for key, one in written.items() if key not in held}
        return Executable(
            {**consumed, **known},
            len(consumed),
            held,
            scopes.place_of(scope),
            arguments.constants,
        )


@final
class _Arguments:
    """The arguments of one call of a program.

    Attributes:
        arrays: The arrays among them, which are the program's inputs.
        constants: The other arguments, which are compiled in.
        form: The key of the compiled version: structure, shapes, types and constants.
    """

    def __init__(self, structure: Any) -> None:
        self._leaves, self._structure = flatten(structure)
        self.arrays: list[Any] = []
        self.constants: list[Any] = []
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
            if source is None:  # if the program uses it, `unlike` raises
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
        self.constants.append(leaf)
        self._made.append(None)
        try:
            hash(leaf)
        except TypeError:
            return type(leaf), id(leaf)
        return type(leaf), leaf


def _is_new(variable: Any) -> bool:
    return keras_compat.stored_value(variable) is None


def _explore(traced: Callable[..., Any], scope: Any, arrays: Sequence[Any]) -> None:
    with scope:
        traced(arrays)


def _never_settles(variables: Any) -> ValueError:
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
    return (
        bool(diverged)
        and isinstance(executable.place, MeshPlacement)
        and any(
            key not in executable.held and components.recall(executable.known[key]) is not None
            for key in diverged
        )
    )
