"""Where Keras variables get their values while JAX traces: one scope inside the other.

Every read and every write of a Keras variable passes the innermost ``keras.StatelessScope`` of its
thread. A program's scope stands outermost and finds out which variables the program needs; in the
code of a replica there is the replica's scope, which knows what the replicas share and what they
hold apart; where something is differentiated there is one more.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, final

import keras
from jax import numpy as jnp

from kerasdist import keras_seam, ownership
from kerasdist.backends.jax.components import derived
from kerasdist.backends.jax.placement import Placement
from kerasdist.errors import ScopeError


class Scope(keras.StatelessScope, abc.ABC):
    """What the scopes have in common: values of variables, and whom to ask for others."""

    def __init__(self) -> None:
        """Makes a scope that knows no variable yet."""
        # What is created in it gets its first value when the program has been traced.
        super().__init__(initialize_variables=False)
        self.variables: dict[int, Any] = {}

    def add_update(self, update: tuple[Any, Any]) -> None:
        """Takes what the user's code assigns.

        Args:
            update: A variable and its new value.
        """
        variable, value = update
        ownership.require_own(variable)
        self.store(variable, self.combined(variable, value), None)

    def get_current_value(self, variable: Any) -> Any:
        """Returns the value that the user's code reads.

        Args:
            variable: The variable.
        """
        return self.peek(variable)

    @abc.abstractmethod
    def peek(self, variable: Any) -> Any:
        """Returns a variable's value without counting that as the user's reading it.

        Args:
            variable: The variable.
        """

    @abc.abstractmethod
    def combined(self, variable: Any, value: Any) -> Any:
        """Returns what is to be stored of a value that the user's code assigns.

        Args:
            variable: The variable.
            value: The value.
        """

    def store(self, variable: Any, value: Any, stack: Any) -> None:
        """Sets the value of a variable.

        Args:
            variable: The variable.
            value: The value.
            stack: What the replicas hold, one after another, or None if that is the value.
        """
        del stack
        self.variables[id(variable)] = variable
        self.state_mapping[id(variable)] = value


@final
class ProgramScope(Scope):
    """The variables of a program, as it takes and returns them.

    Attributes:
        known: Variables that the program is given.
        held: Those of them of which the replicas hold components.
        variables: Other variables that it reads or writes.
        written: Variables that it writes.
        apart: Variables of which it uses or makes components.
        placements: Where it computes.
    """

    def __init__(
        self, known: Mapping[int, Any], values: Sequence[Any], stacks: Mapping[int, Any]
    ) -> None:
        """Makes the scope.

        Args:
            known: Variables, by their ids.
            values: The value of each.
            stacks: Of some of them components, by the variable's id.
        """
        super().__init__()
        self.known = known
        self.state_mapping.update(zip(known, values, strict=True))
        self.held = {key: known[key] for key in stacks}
        self.written: dict[int, Any] = {}
        self.apart: dict[int, Any] = {}
        self.placements: dict[int, Placement] = {}
        self._stacks = {key: (stack, self.state_mapping[key]) for key, stack in stacks.items()}

    def peek(self, variable: Any) -> Any:
        """Returns the value; of a variable that is not known yet a blank of its form."""
        value = self.state_mapping.get(id(variable))
        if value is None:
            self.variables[id(variable)] = variable
            value = jnp.zeros(variable.shape, keras_seam.stored_dtype(variable))
        return value

    def combined(self, variable: Any, value: Any) -> Any:
        """Returns the value."""
        del variable
        return value

    def store(self, variable: Any, value: Any, stack: Any) -> None:
        """Sets the value of a variable."""
        key = id(variable)
        if key not in self.known:
            self.variables[key] = variable
        self.state_mapping[key] = value
        self.written[key] = variable
        if stack is not None:
            self.apart[key] = variable
            self._stacks[key] = stack, value

    def written_stack(self, variable: Any) -> Any:
        """Returns what the replicas hold of a variable after the program, None if its value.

        Args:
            variable: The variable.
        """
        stack, aggregate = self._stacks.get(id(variable), (None, None))
        return stack if aggregate is self.state_mapping[id(variable)] else None

    def stack(self, variable: Any, replicas: int) -> Any:
        """Returns what the replicas hold of a variable, derived from its value if need be.

        Args:
            variable: The variable.
            replicas: How many components.
        """
        value = self.state_mapping[id(variable)]
        stack, aggregate = self._stacks.get(id(variable), (None, None))
        if aggregate is value and stack.shape[0] == replicas:
            return stack
        return derived(variable, value, replicas)

    def note(self, placement: Placement) -> None:
        """Remembers that the program computes somewhere.

        Args:
            placement: Where.
        """
        self.placements[id(placement)] = placement


@final
class OverlayScope(Scope):
    """Variables with other values than outside: what is differentiated by.

    Attributes:
        variables: Variables that are written inside.
        read: Variables that the user's code reads.
        stacks: What the replicas hold of variables that are written inside.
    """

    def __init__(self, values: Mapping[int, Any], outer: Scope | None) -> None:
        """Makes the scope.

        Args:
            values: Values of variables, by the variable's id.
            outer: The scope around it.
        """
        super().__init__()
        self.state_mapping.update(values)
        self.read: dict[int, Any] = {}
        self.stacks: dict[int, Any] = {}
        self._outer = outer

    def get_current_value(self, variable: Any) -> Any:
        """Returns the value, and remembers that it was read."""
        self.read[id(variable)] = variable
        return self.peek(variable)

    def peek(self, variable: Any) -> Any:
        """Returns the value here or outside; None: the variable's own."""
        value = self.state_mapping.get(id(variable))
        return self._outer.peek(variable) if value is None and self._outer is not None else value

    def combined(self, variable: Any, value: Any) -> Any:
        """Lets the scope around it decide."""
        return value if self._outer is None else self._outer.combined(variable, value)

    def store(self, variable: Any, value: Any, stack: Any) -> None:
        """Sets the value of a variable, in here for now."""
        super().store(variable, value, stack)
        if stack is not None:
            self.stacks[id(variable)] = stack


_Kind = TypeVar("_Kind", bound=Scope)


def innermost(kind: type[_Kind]) -> _Kind | None:
    """Returns the innermost scope of a kind in this thread, None if there is none.

    Args:
        kind: The kind of scope.
    """
    scope = keras_seam.stateless_scope()
    while scope is not None and not isinstance(scope, kind):
        scope = scope.original_scope
    return scope


def current() -> Scope | None:
    """Returns the innermost of these scopes in this thread, looking through Keras's own."""
    return innermost(Scope)


def program() -> ProgramScope | None:
    """Returns the scope of the program that is being traced in this thread, None if none is."""
    return innermost(ProgramScope)


def note(placement: Placement) -> None:
    """Tells the program that is being traced, if any, that it computes somewhere.

    Args:
        placement: Where.
    """
    tracing = program()
    if tracing is not None:
        tracing.note(placement)


def place_of(scope: ProgramScope) -> Placement | None:
    """Returns where a program computes, None if it does not say.

    Args:
        scope: The program's scope, after its tracing.

    Raises:
        ScopeError: If it is more than one place.
    """
    places = list(scope.placements.values())
    if len({tuple(map(str, place.devices)) for place in places}) > 1:
        raise ScopeError(
            "Expected the strategies that a kerasdist.function uses to have the same devices. "
            f"Received: devices={[list(map(str, place.devices)) for place in places]}. Write a "
            "function for each."
        )
    return places[0] if places else None


def read_through(original: Any, scope: Any, variable: Any) -> Any:
    """Lets a scope of Keras's or the user's own, inside one of ours, see what it does not know.

    Args:
        original: Keras's ``StatelessScope.get_current_value``.
        scope: The scope that is asked.
        variable: For which variable.
    """
    value = original(scope, variable)
    if value is not None or keras_seam.stateless_scope() is not scope or current() is None:
        return value
    while value is None and scope is not None:
        if isinstance(scope, Scope):
            return scope.get_current_value(variable)
        value = scope.state_mapping.get(id(variable))
        scope = scope.original_scope
    return value
