"""Where Keras variables get their values while JAX traces: one scope inside the other.

Every read and every write of a Keras variable passes the innermost ``keras.StatelessScope`` of its
thread. A program's scope stands outermost and finds out which variables the program needs; in the
code of a replica there is the replica's scope, which knows what the replicas share and what they
hold apart; where something is differentiated there is one more.
"""

from __future__ import annotations

import abc
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, final

import jax
import jax.core
import keras
from jax import numpy as jnp

from kerasdist import context, keras_seam
from kerasdist.backends.jax.components import derived, divided, is_read_by_sum
from kerasdist.backends.jax.exchange import Exchange, only_first
from kerasdist.backends.jax.placement import MeshPlacement, Placement


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


@final
class ReplicaScope(Scope):
    """The variables in the code of one replica.

    A mirrored variable has one value on all replicas, so what they assign is combined at once. Of a
    variable that is aggregated on reading, each holds a component of its own; so it does of one
    without aggregation once it has assigned to it, as in ``tf.distribute``.

    Attributes:
        variables: Variables that are written.
        read: Variables that are read.
        apart: Variables of which this replica holds a component.
        exchange: How it reaches the others.
    """

    def __init__(
        self,
        values: Mapping[int, Any],
        held: Iterable[int],
        outer: Scope,
        replicas: int,
        exchange: Exchange,
    ) -> None:
        """Makes the scope.

        Args:
            values: Values of variables, by the variable's id.
            held: The ids of those of which the replicas hold components.
            outer: The scope around all replicas.
            replicas: How many there are.
            exchange: How they reach each other.
        """
        super().__init__()
        self.state_mapping.update(values)
        self.exchange = exchange
        self.read: dict[int, Any] = {}
        self.apart: dict[int, Any] = {}
        self._held = set(held)
        self._outer = outer
        self._replicas = replicas
        # How a write counts: "combined" by the variable's rule, "equal" on all replicas already,
        # or "copy" where each device's copy of a variable is changed by itself.
        self._writes = "combined"

    def beside(
        self, values: Mapping[int, Any], exchange: Exchange, apart: Iterable[int]
    ) -> ReplicaScope:
        """Returns a scope for code in the midst of this one's, for all replicas.

        Args:
            values: Values of variables, by the variable's id.
            exchange: How the replicas reach each other there.
            apart: The ids of more variables of which they hold components.
        """
        held = {*self._held, *apart}
        return ReplicaScope(values, held, self._outer, self._replicas, exchange)

    def get_current_value(self, variable: Any) -> Any:
        """Returns the value as this code sees it: in cross-replica context the aggregate."""
        self.read[id(variable)] = variable
        value = self.peek(variable)
        if self._is_apart(variable) and context.replica() is None and self._writes != "copy":
            return self.aggregates([variable], [value])[0]
        return value

    def peek(self, variable: Any) -> Any:
        """Returns this replica's value."""
        value = self.state_mapping.get(id(variable))
        if value is None:
            value = self._outer.peek(variable)
        if variable.synchronization == "on_read":
            self.apart[id(variable)] = variable
        return value

    def combined(self, variable: Any, value: Any) -> Any:
        """Returns what is stored of an assigned value, by the rules of ``tf.distribute``."""
        if variable.synchronization == "none":
            raise ValueError(
                "Expected synchronization to be 'auto', 'on_write' or 'on_read' of a variable that "
                f"replicas assign to. Received: synchronization='none', variable={variable.path!r}."
                " Make the variable with one of them."
            )
        apart = self._is_apart(variable)
        if self._writes == "copy":
            self._take_apart(variable)
        elif context.replica() is None:
            if apart and variable.synchronization == "on_read" and variable.aggregation == "sum":
                return divided(value, self._replicas)
        elif apart:
            self._take_apart(variable)
        elif self._writes == "combined":
            return self._combined_on_write(variable, value)
        return value

    def _combined_on_write(self, variable: Any, value: Any) -> Any:
        match variable.aggregation:
            case "none":
                # As in tf.distribute: each replica's copy changes by itself; the first one counts
                # wherever the variable is read outside of replicas.
                self._take_apart(variable)
                return value
            case "only_first_replica":
                return self.exchange.first(value)
            case "mean" if not jnp.issubdtype(value.dtype, jnp.inexact):
                raise ValueError(
                    "Expected a floating-point variable where the mean over the replicas is "
                    f"assigned. Received: dtype={value.dtype}, aggregation='mean', "
                    f"variable={variable.path!r}. Use another aggregation, or assign in "
                    "cross-replica context."
                )
        [total] = self.exchange.total([value])
        return divided(total, self._replicas) if variable.aggregation == "mean" else total

    @contextmanager
    def equal_writes(self) -> Generator[None]:
        """Says that what is assigned inside is equal on all replicas."""
        with self._writing("equal"):
            yield

    @contextmanager
    def copy_writes(self) -> Generator[None]:
        """Says that what is assigned inside is meant for this device's copy."""
        with self._writing("copy"):
            yield

    @contextmanager
    def _writing(self, manner: str) -> Generator[None]:
        before, self._writes = self._writes, manner
        try:
            yield
        finally:
            self._writes = before

    def _is_apart(self, variable: Any) -> bool:
        key = id(variable)
        return key in self._held or key in self.apart or variable.synchronization == "on_read"

    def _take_apart(self, variable: Any) -> None:
        self.apart[id(variable)] = variable

    def written_apart(self) -> dict[int, Any]:
        """Returns, by their ids, the variables that were written of which replicas differ."""
        return {key: one for key, one in self.variables.items() if self._is_apart(one)}

    def aggregates(self, variables: Sequence[Any], values: Sequence[Any]) -> list[Any]:
        """Returns what cross-replica code reads of components, in one all-sum.

        Args:
            variables: Variables.
            values: This replica's component of each.
        """
        parts = []
        for variable, value in zip(variables, values, strict=True):
            summed = variable.aggregation in ("sum", "mean")
            parts.append(value if summed and value.dtype != bool else only_first(value))
        results = []
        for variable, value, total in zip(
            variables, values, self.exchange.total(parts), strict=True
        ):
            mean = variable.aggregation == "mean"
            result = divided(total, self._replicas) if mean else total
            results.append(result.astype(value.dtype))
        return results


def current() -> Scope | None:
    """Returns the innermost of these scopes in this thread, looking through Keras's own."""
    scope = keras_seam.stateless_scope()
    while scope is not None and not isinstance(scope, Scope):
        scope = scope.original_scope
    return scope


def program() -> ProgramScope | None:
    """Returns the scope of the program that is being traced in this thread, None if none is."""
    scope = keras_seam.stateless_scope()
    while scope is not None and not isinstance(scope, ProgramScope):
        scope = scope.original_scope
    return scope


def replica() -> ReplicaScope | None:
    """Returns the scope of the replica whose code is being traced in this thread, None if none."""
    scope = keras_seam.stateless_scope()
    while scope is not None and not isinstance(scope, ReplicaScope):
        scope = scope.original_scope
    return scope


def note(placement: Placement) -> None:
    """Tells the program that is being traced, if any, that it computes somewhere.

    Args:
        placement: Where.
    """
    tracing = program()
    if tracing is not None:
        tracing.note(placement)


def mesh_of(scope: ProgramScope) -> MeshPlacement | None:
    """Returns the mesh that a program computes on, None if it computes on one device.

    Args:
        scope: The program's scope, after its tracing.

    Raises:
        ScopeError: If it is more than one.
    """
    meshes = {p.mesh: p for p in scope.placements.values() if isinstance(p, MeshPlacement)}
    if len(meshes) > 1:
        from kerasdist.errors import ScopeError

        raise ScopeError(
            "Expected the strategies that a kerasdist.function uses to have the same devices. "
            f"Received: devices={[list(map(str, mesh.devices.flat)) for mesh in meshes]}. Write a "
            "function for each."
        )
    return next(iter(meshes.values()), None)


def _read_through(original: Any, scope: Any, variable: Any) -> Any:
    """Lets a scope of Keras's or the user's own, inside one of ours, see what it does not know."""
    value = original(scope, variable)
    if value is not None or keras_seam.stateless_scope() is not scope:
        return value
    while value is None and scope is not None:
        if isinstance(scope, Scope):
            return scope.get_current_value(variable)
        value = scope.state_mapping.get(id(variable))
        scope = scope.original_scope
    return value if current() is not None else None


keras_seam.install_scope_reads(_read_through)


def _made(
    original: Any,
    variable: Any,
    initializer: Any,
    shape: Any = None,
    dtype: Any = None,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Lets a variable be made of a value, not only of an initializer, in the code of a program."""
    if current() is not None and not callable(initializer) and not isinstance(initializer, str):
        with jax.ensure_compile_time_eval():
            value = keras.ops.convert_to_tensor(initializer, dtype)
        if not isinstance(value, jax.core.Tracer):
            initializer, shape, dtype = _Constant(value), value.shape, dtype or value.dtype
    original(variable, initializer, shape, dtype, *args, **kwargs)
    strategy = context.scoped_strategy()
    if strategy is None or strategy.num_replicas_in_sync == 1 or not is_read_by_sum(variable):
        return
    # Each replica starts with what the initializer says, so that the value is the sum of that.
    value = keras_seam.stored_value(variable)
    if value is None:
        keras_seam.multiply_initializer(variable, strategy.num_replicas_in_sync)
    elif value.dtype != bool:
        keras_seam.store_value(variable, value * strategy.num_replicas_in_sync)


class _Constant:
    """Gives a new variable its value."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __call__(self, *_: Any, **__: Any) -> Any:
        return self._value


keras_seam.install_in_variables(_made)
