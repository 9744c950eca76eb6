"""Compiles functions with the Keras variables that they use as inputs and outputs.

A trace finds the variables that a function reads and writes; those that it creates then get their
initial values. It is traced again with the variables' values as inputs beside the arguments, and
the new values of written variables as outputs beside the results, until it needs no others.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from types import FunctionType, MethodType
from typing import Any, Generic, TypeVar, final

import jax
import keras
import numpy as np

from kerasdist import keras_compat
from kerasdist.backends.jax.fit import donation
from kerasdist.backends.jax.loops.executable import Executable, Incomplete
from kerasdist.backends.jax.loops.values import in_one_array, map_values
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
        self._entries: OrderedDict[Hashable, tuple[_Value, list[Any]]] = OrderedDict()

    def get(self, key: Hashable) -> _Value | None:
        """Returns the value of a key, None if there is none."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        return entry[0]

    def put(self, key: Hashable, value: _Value, objects: Iterable[Any]) -> None:
        """Keeps a value until one of the objects is gone; those without weak references stay."""

        def forget(_: object) -> None:
            self._entries.pop(key, None)

        kept = [weakref.ref(x, forget) if type(x).__weakrefoffset__ else x for x in objects]
        self._entries[key] = value, kept
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
        self._of: _Kept[Program] = _Kept()
        self._alike: _Kept[Program] = _Kept()

    def of(self, function: Callable[..., Any]) -> Program:
        """Returns the program of a function, always the same one for one function."""
        # Every access to a method makes a new object, so its instance and function are the key.
        owner = function.__self__ if isinstance(function, MethodType) else function
        code = function.__func__ if isinstance(function, MethodType) else None
        key = id(owner), id(code)
        program = self._of.get(key)
        if program is None:
            program = self._alike_or_new(function)
            self._of.put(key, program, [owner])
        return program

    def _alike_or_new(self, function: Callable[..., Any]) -> Program:
        if not isinstance(function, FunctionType):
            return Program()
        code = function.__code__
        try:
            cells = [cell.cell_contents for cell in function.__closure__ or ()]
        except ValueError:  # one is not set yet
            return Program()
        defaults = function.__defaults__ or (), function.__kwdefaults__ or {}
        seen = [*cells, *defaults[0], *defaults[1].values()]
        objects = [one for one in seen if type(one) not in _VALUES]
        if not all(type(one).__weakrefoffset__ for one in objects):
            return Program()  # such as a list: it may be another one later, in the same place
        known_by = [_constant(one) if type(one) in _VALUES else id(one) for one in seen]
        key = code, id(function.__globals__), tuple(known_by), tuple(defaults[1])
        program = self._alike.get(key)
        if program is None:
            program = Program()
            self._alike.put(key, program, objects)
        return program


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

        def traced(arrays: Sequence[Any]) -> Any:
            args, kwargs = arguments.inside(arrays)
            return function(*args, **kwargs)

        key = arguments.form, id(context.scoped_strategy()), keras_compat.settings()
        with self._lock:
            executable = self._executables.get(key)
            if executable is None:
                executable = self._keep(key, Executable({}, {}, [], None), arguments)
            elif executable.is_outdated():
                executable = self._keep(key, executable.extended(None), arguments)
            for _ in range(_TRACINGS):
                try:
                    # Code on the host, for which the launch may wait, may call other functions.
                    with donation.passing(executable.known):
                        outputs = executable.launch(traced, arguments.arrays)
                    break
                except Incomplete as found:
                    scope = found.scope
                finally:
                    # Also after a failure, since the layers that were built keep their variables.
                    keras_compat.initialize_waiting_variables()
                executable = self._keep(key, executable.extended(scope), arguments)
            else:
                raise _never_settles(scope.variables.values())
        return executable.finish(outputs)

    def _keep(self, key: Hashable, executable: Executable, arguments: _Arguments) -> Executable:
        objects = [*executable.variables().values(), *arguments.objects]
        self._executables.put(key, executable, objects)
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
        self.arrays: list[Any] = []
        self.objects: list[Any] = []
        # Of unequal components each is an array: a program that reads one raises (`source_of`).
        joined = map_values(in_one_array, structure)
        self._leaves, self._structure = jax.tree.flatten(joined)
        self.form: Hashable = self._structure, *map(self._entered, range(len(self._leaves)))

    def inside(self, arrays: Sequence[Any]) -> Any:
        """Rebuilds the arguments from the program's inputs, inside the program."""
        rest = iter(arrays)
        leaves = [next(rest) if leaf is None else leaf for leaf in self._leaves]
        return jax.tree.unflatten(self._structure, leaves)

    def _entered(self, index: int) -> Hashable:
        """Moves a leaf to the arrays, or leaves a constant; returns its part of `form`."""
        leaf = self._leaves[index]
        if is_traced(leaf):
            raise ScopeError(
                "Expected arrays. Received: a value that JAX is tracing, in a call of "
                "strategy.run or of a kerasdist.function. Use kerasdist.function instead of "
                "jax.jit around it, and kerasdist.value_and_grad instead of jax.grad."
            )
        if not isinstance(leaf, keras.Variable) and hasattr(leaf, "__array__"):
            # Another framework's array, such as a batch of tf.data, becomes NumPy's.
            leaf = leaf if is_array(leaf) else np.asarray(leaf)
            self.arrays.append(leaf)
            self._leaves[index] = None
            return leaf.shape, leaf.dtype, getattr(leaf, "weak_type", False)
        if _is_known_by_identity(leaf):
            self.objects.append(leaf)
            return type(leaf), id(leaf)
        return _constant(leaf)


def _is_known_by_identity(leaf: object) -> bool:
    try:
        hash(leaf)
    except TypeError:
        return True
    return type(leaf).__hash__ is object.__hash__


def _constant(leaf: object) -> Hashable:
    """Returns a key that is the same for equal constants of one type; it keeps them alive."""
    # 0.0 equals -0.0, and NaN nothing.
    return type(leaf), repr(leaf) if isinstance(leaf, float | complex) else leaf


def _never_settles(variables: Iterable[keras.Variable]) -> ValueError:
    return ValueError(
        "Expected a function that creates its variables in its first call only. Received: new "
        f"variables in every call, such as {[v.path for v in variables][:3]}. Make them outside, "
        "or keep them where the next call finds them."
    )
