"""Functions compiled with the Keras variables they use as inputs and outputs.

A function is traced once without values, which finds the variables it reads and writes and gives
those it creates the time to get their first values. Then it is compiled: the variables enter with
its arguments, those it writes are consumed and come out anew.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from types import MethodType
from typing import Any, final

import jax
from jax import numpy as jnp

from kerasdist import context, keras_seam
from kerasdist.backends.jax import components, scopes
from kerasdist.backends.jax.entering import Entering
from kerasdist.backends.jax.launch import Incomplete, Version, launch
from kerasdist.backends.jax.placement import MeshPlacement

# Compiled versions that a function keeps, for shapes of arguments and for constants.
_VERSIONS = 128
# How often a function is traced until it creates no variable any more.
_TRACINGS = 4

# Values are taken out of variables, consumed and put back by one thread at a time.
_launching = threading.RLock()


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


@final
class Program:
    """A function that JAX compiles, once for each form of its arguments."""

    def __init__(self) -> None:
        """Starts without compiled versions."""
        self._versions: OrderedDict[Hashable, Version] = OrderedDict()

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
        entering = Entering((args, kwargs))
        arrays = entering.arrays

        def traced(arrays: Sequence[Any]) -> Any:
            args, kwargs = entering.inside(arrays)
            return run(function, *args, **kwargs)

        key = entering.form, id(context.scoped_strategy()), keras_seam.settings()
        with _launching:
            version = self._versions.get(key)
            if version is None or _is_outdated(version):
                version = self._make(traced, arrays, version)
                version.constants = entering.constants()
                self._versions[key] = version
                if len(self._versions) > _VERSIONS:
                    self._versions.popitem(last=False)
            for _ in range(_TRACINGS):
                try:
                    return launch(version, traced, arrays)
                except Incomplete:
                    version = self._make(traced, arrays, version)
                    self._versions[key] = version
            raise _never_settles(version.known.values())

    def _make(
        self, traced: Callable[..., Any], arrays: Sequence[Any], before: Version | None
    ) -> Version:
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
        return Version(known, held, scope.written, scopes.place_of(scope), [])


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


def _abstract(array: Any) -> Any:
    weak = isinstance(array, jax.Array) and array.weak_type
    return jax.ShapeDtypeStruct(array.shape, jnp.result_type(array), weak_type=weak)


def _is_outdated(version: Version) -> bool:
    """Whether replicas hold components of a variable that were equal when it was compiled."""
    diverged = components.diverged(version.known)
    return (
        bool(diverged)
        and isinstance(version.place, MeshPlacement)
        and any(
            key not in version.held and components.recall(version.known[key]) is not None
            for key in diverged
        )
    )
