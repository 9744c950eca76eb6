"""Nested scopes that hold the values of Keras variables while JAX traces.

Every read and every write of a Keras variable passes through the innermost ``keras.StatelessScope``
of its thread. The outermost scope is a `ProgramScope`, which records the variables that the program
needs. The code of a replica runs in a `ReplicaScope`, which distinguishes mirrored variables from
variables of which each replica has its own component. A function that is differentiated runs in an
`OverlayScope`.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, final

import keras
from jax import numpy as jnp

from kerasdist import keras_compat
from kerasdist.backends.jax.loops.components import derived
from kerasdist.backends.jax.mesh.placement import Placement
from kerasdist.core import ownership
from kerasdist.errors import ScopeError

if TYPE_CHECKING:
    import jax


class Scope(keras.StatelessScope, abc.ABC):
    """Stores the values that user code assigns to variables. The base class of the other scopes."""

    def __init__(self) -> None:
        # Variables that are made inside of the scope get their initial values after the trace.
        super().__init__(initialize_variables=False)
        self.variables: dict[int, keras.Variable] = {}

    def add_update(self, update: tuple[Any, Any]) -> None:
        """Stores the value that user code assigns to a variable."""
        variable, value = update
        ownership.require_own(variable)
        self.store(variable, self.combined(variable, value), None)

    def get_current_value(self, variable: keras.Variable) -> jax.Array:
        """Returns the value that user code reads from a variable."""
        return self.peek(variable)

    @abc.abstractmethod
    def peek(self, variable: keras.Variable) -> jax.Array:
        """Returns a variable's value without recording that user code has read it."""

    def combined(self, variable: keras.Variable, value: jax.Array) -> jax.Array:
        """Returns the value to store when user code assigns a value to a variable."""
        return value

    def store(self, variable: keras.Variable, value: jax.Array, stack: jax.Array | None) -> None:
        """Sets the value of a variable."""
        self.variables[id(variable)] = variable
        self.state_mapping[id(variable)] = value


@final
class ProgramScope(Scope):
    """A scope that records the variables that a program takes as inputs and returns as outputs.

    Attributes:
        known: The variables that are inputs of the program.
        held: Those known variables of which each replica has its own component.
        variables: Variables that the program reads or writes, but that are not its inputs yet.
        written: Variables that the program writes.
        apart: Variables of which the program uses or makes one component per replica.
        place: The placement on which the program computes; None if it runs where its arguments are.
    """

    def __init__(
        self,
        known: Mapping[int, keras.Variable],
        values: Sequence[jax.Array],
        stacks: Mapping[int, jax.Array],
    ) -> None:
        super().__init__()
        self.known = known
        self.state_mapping.update(zip(known, values, strict=True))
        self.held = {key: known[key] for key in stacks}
        self.written: dict[int, keras.Variable] = {}
        self.apart: dict[int, keras.Variable] = {}
        self.place: Placement | None = None
        self._stacks = {key: (stack, self.state_mapping[key]) for key, stack in stacks.items()}

    def peek(self, variable: keras.Variable) -> jax.Array:
        """Returns a variable's value.

        Returns zeros if the variable is not an input of the program yet. This trace then only
        serves to find such variables, and JAX traces the program again with them as inputs.
        """
        value = self.state_mapping.get(id(variable))
        if value is None:
            self.variables[id(variable)] = variable
            value = jnp.zeros(variable.shape, keras_compat.stored_dtype(variable))
        return value

    def store(self, variable: keras.Variable, value: jax.Array, stack: jax.Array | None) -> None:
        """Sets a variable's value and, if `stack` is not None, the replicas' components."""
        key = id(variable)
        if key not in self.known:
            self.variables[key] = variable
        self.state_mapping[key] = value
        self.written[key] = variable
        if stack is not None:
            self.apart[key] = variable
            self._stacks[key] = stack, value

    def written_stack(self, variable: keras.Variable) -> Any:
        """Returns the components that a variable has after the program; None if there are none."""
        stack, aggregate = self._stacks.get(id(variable), (None, None))
        return stack if aggregate is self.state_mapping[id(variable)] else None

    def stack(self, variable: keras.Variable, replicas: int) -> jax.Array:
        """Returns a variable's components; if it has none, derives them from its value."""
        if self.has_components(variable):
            stack, _ = self._stacks[id(variable)]
            if stack.shape[0] == replicas:
                return stack
        return derived(variable, self.peek(variable), replicas)

    def has_components(self, variable: keras.Variable) -> bool:
        """Returns whether a variable has components whose aggregate is the variable's value."""
        value = self.peek(variable)
        known = self._stacks.get(id(variable))
        return known is not None and known[1] is value

    def compute_on(self, place: Placement) -> None:
        """Records the placement on which the program computes.

        Refuses a second placement that has other devices.
        """
        places = [one.devices for one in (self.place or place, place)]
        if places[0] != places[1]:
            raise ScopeError(
                "Expected the strategies that a kerasdist.function uses to have the same devices. "
                f"Received: devices={[list(map(str, devices)) for devices in places]}. Write a "
                "function for each strategy."
            )
        self.place = self.place or place


@final
class OverlayScope(Scope):
    """A scope in which variables have the values that a differentiated function gets as inputs.

    Attributes:
        variables: Variables that are written inside of the function.
        read: Variables that user code reads.
        stacks: The replicas' components of variables that are written inside of the function.
    """

    def __init__(self, values: Mapping[int, jax.Array], outer: Scope | None) -> None:
        super().__init__()
        self.state_mapping.update(values)
        self.read: dict[int, keras.Variable] = {}
        self.stacks: dict[int, Any] = {}
        self._outer = outer

    def get_current_value(self, variable: keras.Variable) -> jax.Array:
        """Returns a variable's value, and records that user code has read it."""
        self.read[id(variable)] = variable
        return self.peek(variable)

    def peek(self, variable: keras.Variable) -> Any:
        """Returns the value in this or the outer scope; None if neither has a value."""
        value = self.state_mapping.get(id(variable))
        return self._outer.peek(variable) if value is None and self._outer is not None else value

    def combined(self, variable: keras.Variable, value: jax.Array) -> jax.Array:
        """Returns the value to store, which the outer scope determines."""
        return value if self._outer is None else self._outer.combined(variable, value)

    def store(self, variable: keras.Variable, value: jax.Array, stack: jax.Array | None) -> None:
        """Sets a variable's value in this scope; `value_and_grad` passes it to the outer scope."""
        super().store(variable, value, stack)
        if stack is not None:
            self.stacks[id(variable)] = stack


_Kind = TypeVar("_Kind", bound=Scope)


def innermost(kind: type[_Kind]) -> _Kind | None:
    """Returns the innermost scope of a class in this thread, None if there is none."""
    scope = keras_compat.get_stateless_scope()
    while scope is not None and not isinstance(scope, kind):
        scope = scope.original_scope
    return scope


def current() -> Scope | None:
    """Returns this thread's innermost `Scope`, None if there is none."""
    return innermost(Scope)


def program() -> ProgramScope | None:
    """Returns the scope of the program that this thread is tracing, None if there is none."""
    return innermost(ProgramScope)


def read_through(variable: keras.Variable) -> Any:
    """Returns a variable's value from the scopes of this thread; None if Keras itself can read it.

    If the innermost scope is a plain `StatelessScope` without the value, Keras does not look into
    the outer scopes, but this function does.
    """
    scope: Any = keras_compat.get_stateless_scope()
    if isinstance(scope, Scope) or current() is None:
        return None
    value = scope.get_current_value(variable)
    while value is None and scope is not None:
        if isinstance(scope, Scope):
            return scope.get_current_value(variable)
        value = scope.state_mapping.get(id(variable))
        scope = scope.original_scope
    return value
