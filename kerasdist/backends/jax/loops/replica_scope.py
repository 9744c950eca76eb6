"""The scope through which a replica's code uses variables, and the collectives of that code."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, final

import jax
import keras
from jax import numpy as jnp

from kerasdist import keras_compat
from kerasdist.api.options import CommunicationOptions
from kerasdist.backends.base.checks import check_communication, check_summable
from kerasdist.backends.base.collectives import DEFAULT_COMMUNICATION, Apply, Collectives, Variables
from kerasdist.backends.base.variable_rules import (
    counts_all_replicas,
    is_combined_on_write,
    is_on_read,
    is_sum_on_read,
    shares_of_sum,
)
from kerasdist.backends.jax.loops import scopes
from kerasdist.backends.jax.loops.scopes import Scope
from kerasdist.backends.jax.loops.values import flatten, of_own, own
from kerasdist.backends.jax.mesh.layout import AXIS, is_first, only_first
from kerasdist.core import context
from kerasdist.core.structures import Arguments

if TYPE_CHECKING:
    from kerasdist.api.strategy import Strategy


@dataclass(frozen=True)
class Differentiated:
    """The result of differentiating a function: its value, its gradients and other results.

    Attributes:
        value: The value of the function.
        gradients: One gradient for each value by which the function was differentiated.
        parts: Arrays that the function returned besides the value.
        notes: Python objects that belong to the call of the function, such as a scope.
    """

    value: jax.Array
    gradients: list[Any]
    parts: Any
    notes: Any


class Exchange:
    """Exchanges values between the replicas, which must all make the same calls.

    This class uses JAX's collectives over the mesh axis. JAX can differentiate them: the gradient
    of `psum` is `psum`.

    Attributes:
        base: The scope of the code that makes the exchanges.
    """

    base: Any = None

    def total(self, tensors: Sequence[jax.Array]) -> list[jax.Array]:
        """Sums each tensor over the replicas, with a single `psum` for all tensors."""
        return list(jax.lax.psum(list(tensors), AXIS)) if tensors else []

    def gather(self, tensor: jax.Array, axis: int) -> jax.Array:
        """Concatenates the replicas' tensors, which must all have the same shape."""
        return jax.lax.all_gather(tensor, AXIS, axis=axis, tiled=True)

    def merge(self, scope: Any, leaves: Sequence[Any], call: Callable[[list[Any]], Any]) -> Any:
        """Just calls the function, because JAX traces the code once for all replicas anyway."""
        return call(list(leaves))

    def differentiated(
        self, scope: Any, alone: Callable[[], Differentiated], joint: Any, by: Any
    ) -> Differentiated:
        """Differentiates a function by calling `alone`; only subclasses use the other arguments."""
        return alone()


@final
class ReplicaScope(Scope):
    """The scope through which one replica's code reads and writes variables, as in tf.distribute.

    A mirrored variable has one value on all replicas, so the values that replicas assign to it are
    combined at once. Of a sync-on-read variable each replica has its own component. The same holds
    for a variable whose aggregation is "none", once replica code has assigned a value to it.

    Attributes:
        variables: The variables that were written.
        read: The variables that were read.
        apart: The variables of which this replica has its own component.
        exchange: How this replica exchanges values with the others.
    """

    def __init__(
        self,
        values: Mapping[int, jax.Array],
        held: Iterable[int],
        outer: Scope,
        replicas: int,
        exchange: Exchange,
    ) -> None:
        super().__init__()
        self.state_mapping.update(values)
        self.exchange = exchange
        exchange.base = self
        self.read: dict[int, keras.Variable] = {}
        self.apart: dict[int, keras.Variable] = {}
        self._held = set(held)
        self._outer = outer
        self._replicas = replicas
        # What the method `combined` does with a value that code assigns. "combined" combines the
        # values of all replicas by the variable's aggregation. "equal" stores the value, because
        # all replicas assign the same one. "copy" changes only this device's copy.
        self._writes = "combined"

    def beside(
        self, values: Mapping[int, jax.Array], exchange: Exchange, apart: Iterable[int]
    ) -> ReplicaScope:
        """Returns a scope for cross-replica code that is called from this replica's code."""
        held = {*self._held, *apart}
        return ReplicaScope(values, held, self._outer, self._replicas, exchange)

    def get_current_value(self, variable: keras.Variable) -> jax.Array:
        """Returns this replica's value; in cross-replica context, the aggregate of all values."""
        self.read[id(variable)] = variable
        value = self.peek(variable)
        if self.is_apart(variable) and context.current.replica is None and self._writes != "copy":
            return self.aggregates([variable], [value])[0]
        return value

    def peek(self, variable: keras.Variable) -> jax.Array:
        """Returns the value that a variable has on this replica."""
        value = self.state_mapping.get(id(variable))
        if value is None:
            value = self._outer.peek(variable)
        if is_on_read(variable):
            self.apart[id(variable)] = variable
        return value

    def combined(self, variable: keras.Variable, value: jax.Array) -> jax.Array:
        """Returns the value to store when code assigns a value, by the rules of tf.distribute."""
        if self._writes == "copy":
            self.apart[id(variable)] = variable
        elif context.current.replica is None:
            if is_sum_on_read(variable):
                first, share = shares_of_sum(value, self._replicas)
                return share if first is share else jnp.where(is_first(), first, share)
        elif self.is_apart(variable):
            self.apart[id(variable)] = variable
        elif self._writes == "combined":
            if is_combined_on_write(variable):
                return self.aggregates([variable], [value])[0]
            self.apart[id(variable)] = variable
        return value

    def writing(self, manner: Literal["equal", "copy"]) -> AbstractContextManager[None]:
        """Returns a context in which replicas assign "equal" values, or each to its own "copy"."""
        return context.replaced(self, "_writes", manner)

    def is_apart(self, variable: keras.Variable) -> bool:
        """Returns whether each replica holds its own component of a variable."""
        key = id(variable)
        return key in self._held or key in self.apart or is_on_read(variable)

    def written_apart(self) -> dict[int, Any]:
        """Returns, by id, the written variables of which each replica has its own component."""
        return {key: one for key, one in self.variables.items() if self.is_apart(one)}

    def aggregates(
        self, variables: Sequence[keras.Variable], values: Sequence[jax.Array]
    ) -> list[jax.Array]:
        """Returns the aggregates of several variables' components, with a single all-reduce."""
        parts = [
            value if counts_all_replicas(variable) else only_first(value)
            for variable, value in zip(variables, values, strict=True)
        ]
        totals = self.exchange.total(parts)
        for index, variable in enumerate(variables):
            if variable.aggregation == "mean":
                totals[index] = totals[index] / self._replicas
        return [total.astype(value.dtype) for total, value in zip(totals, values, strict=True)]


def current() -> ReplicaScope | None:
    """Returns the scope of the replica whose code this thread traces, None if there is none."""
    return scopes.innermost(ReplicaScope)


@final
class JaxCollectives(Collectives):
    """The collectives of a program that is traced once for all its replicas."""

    def __init__(self, scope: ReplicaScope, replicas: int) -> None:
        self._scope = scope
        self._replicas = replicas

    def merge_call(self, strategy: Strategy, function: Callable[..., Any], given: Arguments) -> Any:
        """Calls the function with distributed values, made of the arguments of all replicas."""
        leaves, structure = flatten(given)

        def merged(leaves: list[Any]) -> Any:
            values = of_own(jax.tree.unflatten(structure, leaves), self._replicas)
            with context.replica_scope(None):
                return own(values.call(function, strategy))

        return self._scope.exchange.merge(self._scope, leaves, merged)

    def all_sum(
        self, tensors: Sequence[Any], options: CommunicationOptions = DEFAULT_COMMUNICATION
    ) -> list[Any]:
        """Sums each tensor over the replicas, with a single collective for all tensors."""
        if options is not DEFAULT_COMMUNICATION:
            check_communication(options, "JAX", ())
        tensors = list(map(keras_compat.ops.convert_to_tensor, tensors))
        for tensor in tensors:
            check_summable(tensor.dtype.name)
        return self._scope.exchange.total(tensors)

    def all_gather(self, tensor: Any, axis: int = 0) -> Any:
        """Returns the replicas' tensors concatenated along an axis."""
        return self._scope.exchange.gather(keras_compat.ops.convert_to_tensor(tensor), axis)

    def equal_writes(self) -> AbstractContextManager[None]:
        """Returns a context in which all replicas assign equal values, so nothing is exchanged."""
        return self._scope.writing("equal")

    def apply_gradients(
        self, apply: Apply, optimizer: keras.Optimizer, gradients: list[Any], variables: Variables
    ) -> Any:
        """Sums gradients over the replicas; then each replica makes the same update."""
        known = keras_compat.optimized_variables(optimizer) if variables is None else variables
        replaced = self.replaced_by_gradients(gradients, known)
        given = {i: one for i, one in enumerate(gradients) if one is not None and i not in replaced}
        sums = dict(zip(given, self.all_sum([*given.values()]), strict=True))
        gradients = [(sums | replaced).get(index) for index in range(len(gradients))]
        with context.replaced(context.current, "applies", True), self._scope.writing("equal"):
            return apply(optimizer, gradients, variables)
