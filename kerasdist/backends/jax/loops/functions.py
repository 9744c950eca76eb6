"""`kerasdist.function`, `kerasdist.value_and_grad`, and the programs that JAX compiles for them.

A program is a function whose inputs and outputs include the Keras variables that it uses. A first
trace finds the variables that the user's function reads, writes and creates. After this trace, the
created variables get their initial values. In the next trace the program's inputs are the arguments
and the values of the variables, and its outputs are the results and the new values. Traces are
repeated until a trace needs no further variable.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from types import FunctionType, MethodType
from typing import Any, Generic, TypeVar, final

import jax
import keras
import numpy as np

from kerasdist import keras_compat
from kerasdist.backends.base.variable_rules import made_in_every_call
from kerasdist.backends.jax.fit import donation
from kerasdist.backends.jax.loops import components, replica_scope, scopes
from kerasdist.backends.jax.loops.replica_scope import Differentiated
from kerasdist.backends.jax.loops.values import Stacked, in_one_array, is_distributed, map_values
from kerasdist.backends.jax.mesh import creation, host_memory, sharded_state
from kerasdist.backends.jax.mesh.arrays import is_array, is_traced, local_copy, on_device
from kerasdist.backends.jax.mesh.placement import Placement
from kerasdist.core import context
from kerasdist.core.internals import codes_in
from kerasdist.errors import ScopeError
from kerasdist.job.job import FUNCTION, translating_failures

# How many compiled versions of a function are kept at most. Arguments of other shapes, or other
# constants as arguments, need another version.
_VERSIONS = 128
# Functions with the same code share a program if the values that they refer to are equal. Values of
# these types are compared by equality, other values by identity.
_VALUES = (bool, int, float, complex, str, bytes, type(None))
# How often a function is traced at most. Each trace but the last may create variables.
_TRACINGS = 4


def function(function: Callable[..., Any], jit_compile: bool) -> Callable[..., Any]:
    """Returns a function that JAX compiles together with the variables that the function uses.

    JAX always compiles with XLA, so `jit_compile` has no effect.
    """
    creation.install()
    program = Program()

    @functools.wraps(function)
    def compiled(*args: object, **kwargs: object) -> Any:
        if scopes.program() is not None:
            return function(*args, **kwargs)  # the call becomes a part of the program being traced
        with translating_failures(FUNCTION):
            return program(function, args, kwargs)

    return compiled


def value_and_grad(
    function: Callable[[], tuple[Any, Any]], variables: Sequence[keras.Variable]
) -> tuple[tuple[Any, Any], list[Any]]:
    """Returns a function's result, and the gradients with respect to Keras variables.

    JAX differentiates only with respect to inputs. So while the function runs, an `OverlayScope`
    gives the variables the values that JAX passes as inputs.
    """
    creation.install()
    outer = scopes.current()
    by_key = {id(variable): variable for variable in variables}
    values = [_value(outer, variable) for variable in by_key.values()]

    def call(scope: scopes.OverlayScope) -> tuple[Any, Any, Any]:
        with scope:
            value, aux = function()
        updates = {key: scope.state_mapping[key] for key in scope.variables}
        return value, (aux, updates, scope.stacks), scope

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
    (aux, updates, stacks), scope = found.parts, found.notes
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
    return (found.value, aux), gradients


def _value(outer: scopes.Scope | None, variable: keras.Variable) -> Any:
    value = None if outer is None else outer.peek(variable)
    if value is None:
        donation.mark_read(variable)
        value = local_copy(sharded_state.whole(variable, keras_compat.stored_value(variable)))
    return value


_Value = TypeVar("_Value")


@final
class _Kept(Generic[_Value]):
    """A cache of recently used values by key.

    Each entry belongs to some objects, such as a function, but does not keep them alive. When one
    of these objects is freed, the entry is dropped.
    """

    def __init__(self) -> None:
        self._entries: OrderedDict[Hashable, tuple[_Value, list[Any]]] = OrderedDict()

    def get(self, key: Hashable) -> _Value | None:
        """Returns the value of a key, None if there is none."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        return entry[0]

    def put(self, key: Hashable, value: _Value, objects: Iterable[Any]) -> None:
        """Stores a value. When one of `objects` is freed, the entry is dropped."""

        def forget(_: object) -> None:
            self._entries.pop(key, None)

        kept = [weakref.ref(x, forget) if type(x).__weakrefoffset__ else x for x in objects]
        self._entries[key] = value, kept
        self._entries.move_to_end(key)
        if len(self._entries) > _VERSIONS:
            self._entries.popitem(last=False)


@final
class Programs:
    """Keeps a program for each function that was called recently and that still exists.

    Functions that have the same code and refer to the same objects share a program. For example, a
    lambda expression in a loop makes such functions.
    """

    def __init__(self) -> None:
        self._of: _Kept[Program] = _Kept()
        self._alike: _Kept[Program] = _Kept()

    def of(self, function: Callable[..., Any]) -> Program:
        """Returns the program that is kept for a function; makes one if there is none."""
        # Python makes a new method object at every access, so the key has the ids of the method's
        # instance and function.
        owner = function.__self__ if isinstance(function, MethodType) else function
        code = function.__func__ if isinstance(function, MethodType) else None
        key = id(owner), id(code)
        program = self._of.get(key)
        if program is None:
            program = self._alike_or_new(function)
            self._of.put(key, program, [owner, code])
        return program

    def _alike_or_new(self, function: Callable[..., Any]) -> Program:
        if not isinstance(function, FunctionType):
            return Program()
        code = function.__code__
        try:
            cells = [cell.cell_contents for cell in function.__closure__ or ()]
        except ValueError:  # a cell of the closure is not set yet
            return Program()
        defaults = function.__defaults__ or (), function.__kwdefaults__ or {}
        names = [name for one in codes_in(code) for name in one.co_names]
        used = map(function.__globals__.get, names)
        seen = [*cells, *used, *defaults[0], *defaults[1].values()]
        objects = [one for one in seen if type(one) not in _VALUES]
        if not all(type(one).__weakrefoffset__ for one in objects):
            # Some objects, such as lists, allow no weak references, so nobody would notice when
            # they are freed. A new list may have the id of a freed list, and would then be taken
            # for the freed list.
            return Program()
        known_by = [_constant(one) if type(one) in _VALUES else id(one) for one in seen]
        key = code, id(function.__globals__), tuple(known_by), tuple(defaults[1])
        program = self._alike.get(key)
        if program is None:
            program = Program()
            self._alike.put(key, program, objects)
        return program


@final
class Program:
    """A function that JAX compiles once for each combination of its arguments' shapes and types.

    Arguments that are not arrays are constants, and each combination of constants counts, too.
    """

    def __init__(self) -> None:
        self._executables: _Kept[Executable] = _Kept()
        self._lock = threading.RLock()

    def __call__(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Calls ``function(*args, **kwargs)``, compiled."""
        arguments = _Arguments((args, kwargs))

        def traced(arrays: Sequence[Any]) -> Any:
            args, kwargs = arguments.inside(arrays)
            return function(*args, **kwargs)

        strategy = context.scoped_strategy()
        key = arguments.form, id(strategy), keras_compat.settings()
        objects = [*arguments.objects, strategy]
        with self._lock:
            executable = self._executables.get(key)
            if executable is None:
                executable = self._keep(key, Executable({}, {}, [], None), objects)
            elif executable.is_outdated():
                executable = self._keep(key, executable.extended(None), objects)
            for _ in range(_TRACINGS):
                try:
                    # The lock `donation.launching` is not taken here. The program may have a
                    # callback to the host, which runs in another thread. If the callback calls a
                    # function that takes the lock, it may wait for the lock forever.
                    with donation.passing(executable.known):
                        outputs = executable.launch(traced, arguments.arrays)
                    break
                except Incomplete as found:
                    scope = found.scope
                finally:
                    # New variables get values even after a failure, because layers that were built
                    # keep these variables.
                    keras_compat.initialize_waiting_variables()
                executable = self._keep(key, executable.extended(scope), objects)
            else:
                raise made_in_every_call([one.path for one in scope.variables.values()])
        return executable.finish(outputs)

    def _keep(self, key: Hashable, executable: Executable, objects: Iterable[Any]) -> Executable:
        self._executables.put(key, executable, [*executable.variables().values(), *objects])
        return executable


@final
class _Arguments:
    """The arguments of one call of a program.

    Attributes:
        arrays: The arguments that are arrays; these are the inputs of the program.
        objects: The arguments that are not arrays, and that are compared by identity. They are
            constants of the program.
        form: The key of the compiled version: structure, shapes, types and constants.
    """

    def __init__(self, structure: Any) -> None:
        self.arrays: list[Any] = []
        self.objects: list[Any] = []
        # `in_one_array` puts the components of a distributed value into one array, except
        # components that differ in rank or type. `source_of` refuses such components later.
        joined = map_values(in_one_array, structure)
        self._leaves, self._structure = jax.tree.flatten(joined)
        self.form: Hashable = self._structure, *map(self._entered, range(len(self._leaves)))

    def inside(self, arrays: Sequence[Any]) -> Any:
        """Rebuilds the arguments from the program's inputs, inside the program."""
        rest = iter(arrays)
        leaves = [next(rest) if leaf is None else leaf for leaf in self._leaves]
        return jax.tree.unflatten(self._structure, leaves)

    def _entered(self, index: int) -> Hashable:
        """Stores a leaf as an array or as a constant; returns the leaf's entry in `form`."""
        leaf = self._leaves[index]
        if is_traced(leaf):
            raise ScopeError(
                "Expected arrays. Received: a value that JAX is tracing, in a call of "
                "strategy.run or of a kerasdist.function. Use kerasdist.function instead of "
                "jax.jit around the call, and kerasdist.value_and_grad instead of jax.grad."
            )
        if not isinstance(leaf, keras.Variable) and hasattr(leaf, "__array__"):
            # An array of another framework, such as a batch of tf.data, becomes a NumPy array.
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
    """Returns a key by which constants of the same type and value count as the same constant."""
    # The key has the `repr` of a float, because 0.0 is equal to -0.0, and NaN not even to itself.
    return type(leaf), repr(leaf) if isinstance(leaf, float | complex) else leaf


@dataclass(eq=False)
class Incomplete(Exception):  # noqa: N818  not an error: another trace follows
    """Raised if a trace needs variables, or a mesh, that the program does not have yet.

    Attributes:
        scope: The scope of the trace.
    """

    scope: scopes.ProgramScope


@final
class Executable:
    """A program for arguments of certain shapes and types, compiled at its first launch.

    The executable does not keep its variables alive. After one of its variables is freed, the
    executable cannot be used any more.

    Attributes:
        known: The variables that are inputs of the program, by their ids.
        held: The ids of those known variables of which each replica has its own component.
        place: The placement on which the program runs; None if it runs where its arguments are.
    """

    def __init__(
        self,
        consumed: dict[int, keras.Variable],
        others: dict[int, keras.Variable],
        held: Sequence[int],
        place: Placement | None,
    ) -> None:
        """Stores the inputs: variables whose arrays the program consumes (donates), and others."""
        variables = {**consumed, **others}
        self.known = {one: weakref.ref(variable) for one, variable in variables.items()}
        self.held = held
        self.place = place
        self._trainable = {one: variable.trainable for one, variable in variables.items()}
        self._consumed = len(consumed)
        # The function that JAX traces. It is set only during a call, because it refers to user code
        # and arguments, which this object must not keep alive.
        self._traced: Callable[..., Any] | None = None
        # What a trace has found: the ids of variables whose new values the program returns; the ids
        # of variables of which it returns new components, one per replica; the results that are not
        # arrays; and the structure of the results.
        self._written: list[int] = []
        self._written_apart: list[int] = []
        self._constants: list[Any] = []
        self._structure: Any = None
        # The digest of the program, by which workers find out whether they have equal programs.
        self._digest: str | None = None

    def variables(self) -> dict[int, Any]:
        """Returns the known variables, by their ids."""
        return {key: reference() for key, reference in self.known.items()}

    def is_outdated(self) -> bool:
        """Returns whether the program must be traced anew.

        This is necessary if a variable was frozen or unfrozen since the trace, or if a variable now
        has a component for each replica.
        """
        variables = self.variables()
        if any(variables[one].trainable is not was for one, was in self._trainable.items()):
            return True
        return self.place is not None and not components.diverged(variables) <= {*self.held}

    def extended(self, scope: scopes.ProgramScope | None) -> Executable:
        """Returns an executable for the same program with more variables, or with a mesh.

        `scope` is the scope of a trace, in which the program has read further variables, or
        variables on a mesh; None if the program is only outdated (`is_outdated`).
        """
        known = self.variables()
        consumed = dict(list(known.items())[: self._consumed])
        held = {*self.held}
        place = self.place
        if scope is not None:
            known |= scope.variables
            consumed |= scope.written
            held.update(scope.apart)
            place = scope.place
        held |= components.diverged(known)
        consumed = {one: variable for one, variable in consumed.items() if one not in held}
        return Executable(consumed, known, [one for one in known if one in held], place)

    def launch(self, traced: Callable[..., Any], arrays: Sequence[Any]) -> tuple[Any, ...]:
        """Starts the program, gives variables their new values, returns the program's outputs."""
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
            # A launch is one call of C code, and Python raises KeyboardInterrupt only between its
            # own instructions. So no interrupt can come after old values are consumed and before
            # `results` has the new values.
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
        """Returns the results of the user's function for one launch; may wait for the devices."""
        new, _, found = outputs
        if self.place is not None:
            self.place.after_launch(found, new)
        arrays = iter(found)
        leaves = [next(arrays) if leaf is None else leaf for leaf in self._constants]
        results = jax.tree.unflatten(self._structure, leaves)
        return map_values(lambda leaf: leaf if is_distributed(leaf) else local_copy(leaf), results)

    def _arguments(
        self, known: dict[int, keras.Variable], arrays: Sequence[Any]
    ) -> tuple[Any, ...]:
        """Returns the arguments of the compiled function."""
        place, count = self.place, self._consumed
        variables = list(known.values())
        values = keras_compat.stored_values(variables)
        values[:count] = donation.consumable(variables[:count], values[:count])
        if place is None:
            values = [on_device(local_copy(one)) for one in values]
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
        # None: new values keep the shardings that `host_memory.constrained` sets in the program.
        variables = None if place.layout.shards_state else place.whole
        return jax.jit(self._program, donate_argnums=0, out_shardings=(variables, place.rows, None))

    def _program(
        self, consumed: Sequence[Any], kept: Sequence[Any], stacks: Sequence[Any], arrays: Any
    ) -> tuple[list[Any], list[Any], list[Any]]:
        """Returns variables' new values and components, and the results; JAX traces this method."""
        known, place = self.variables(), self.place
        assert self._traced is not None
        held = dict(zip(self.held, stacks, strict=False))  # `stacks` is empty if there is no mesh
        values = [*consumed, *kept]
        if place is not None:
            values = host_memory.to_device(values, place.layout.of_variables([*known.values()]))
        scope = scopes.ProgramScope(known, values, held)
        with scope:
            results = map_values(in_one_array, self._traced(arrays))
        if scope.variables or (place is None and scope.place is not None):
            raise Incomplete(scope)
        # A variable whose array is consumed needs a new array, even if this trace does not write
        # the variable.
        written = {**dict(list(known.items())[: self._consumed]), **scope.written}
        apart = {key: v for key, v in written.items() if scope.written_stack(v) is not None}
        self._written, self._written_apart = list(written), list(apart)
        new = [scope.peek(variable) for variable in written.values()]
        if place is not None:
            shardings = place.layout.of_variables([*written.values()])
            new = list(map(host_memory.constrained, new, shardings))
            results = map_values(partial(_on_mesh, place), results)
        leaves, self._structure = jax.tree.flatten(results)
        self._constants = [None if is_array(leaf) else leaf for leaf in leaves]
        found = [leaf for leaf in leaves if is_array(leaf)]
        return new, [scope.written_stack(one) for one in apart.values()], found


def _on_mesh(place: Placement, result: Any) -> Any:
    """Constrains how a result in a program is placed.

    A distributed value has each component on its replica's devices. Other results are whole on
    every device.
    """
    is_sharded = is_distributed(result) and isinstance(result.source, Stacked)
    sharding = place.rows if is_sharded else place.whole
    return jax.tree.map(
        lambda leaf: jax.lax.with_sharding_constraint(leaf, sharding) if is_array(leaf) else leaf,
        result,
    )
