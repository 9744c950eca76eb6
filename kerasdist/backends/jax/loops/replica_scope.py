"""The variables in the code of one replica, by the rules of ``tf.distribute``."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, final

from jax import numpy as jnp

from kerasdist.backends.base.variable_rules import (
    Assignment,
    assignment_in_loop,
    counts_all_replicas,
    is_on_read,
    is_sum_on_read,
)
from kerasdist.backends.jax.loops import scopes
from kerasdist.backends.jax.loops.components import divided, shares
from kerasdist.backends.jax.loops.scopes import Scope
from kerasdist.backends.jax.mesh.exchange import Exchange, is_first, only_first
from kerasdist.core import context


@final
class ReplicaScope(Scope):
    """The variables in the code of one replica.

    A mirrored variable has one value on all replicas, so values that they assign are combined at
    once. Of a sync-on-read variable each replica holds a component. It also does of a variable
    without aggregation, once replica code has assigned to it, as in ``tf.distribute``.

    Attributes:
        variables: Variables that are written.
        read: Variables that are read.
        apart: Variables of which this replica holds a component.
        exchange: How this replica exchanges values with the others.
    """

    def __init__(
        self,
        values: Mapping[int, Any],
        held: Iterable[int],
        outer: Scope,
        replicas: int,
        exchange: Exchange,
    ) -> None:
        super().__init__()
        self.state_mapping.update(values)
        self.exchange = exchange
        self.read: dict[int, Any] = {}
        self.apart: dict[int, Any] = {}
        self._held = set(held)
        self._outer = outer
        self._replicas = replicas
        # How to treat a write: "combined" by the variable's aggregation, "equal" on all replicas
        # already, or "copy" if it changes only this device's copy of the variable.
        self._writes = "combined"

    def beside(
        self, values: Mapping[int, Any], exchange: Exchange, apart: Iterable[int]
    ) -> ReplicaScope:
        """Returns a scope for cross-replica code that this replica's code calls."""
        held = {*self._held, *apart}
        return ReplicaScope(values, held, self._outer, self._replicas, exchange)

    def get_current_value(self, variable: Any) -> Any:
        """Returns this replica's value, or in cross-replica context the aggregate."""
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
        if is_on_read(variable):
            self.apart[id(variable)] = variable
        return value

    def combined(self, variable: Any, value: Any) -> Any:
        """Returns the value to store for an assigned value, by the rules of ``tf.distribute``."""
        apart = self._is_apart(variable)
        if self._writes == "copy":
            self._take_apart(variable)
        elif context.replica() is None:
            if is_sum_on_read(variable):
                first, share = shares(value, self._replicas)
                return share if first is share else jnp.where(is_first(), first, share)
        elif apart:
            self._take_apart(variable)
        elif self._writes == "combined":
            return self._combined_on_write(variable, value)
        return value

    def _combined_on_write(self, variable: Any, value: Any) -> Any:
        is_float = jnp.issubdtype(value.dtype, jnp.inexact)
        match assignment_in_loop(variable, is_float=is_float):
            case Assignment.OWN:
                self._take_apart(variable)
                return value
            case Assignment.FIRST:
                return self.exchange.first(value)
            case Assignment.SUM:
                [total] = self.exchange.total([value])
                return total
            case Assignment.MEAN:
                [total] = self.exchange.total([value])
                return divided(total, self._replicas)

    def equal_writes(self) -> AbstractContextManager[None]:
        """Returns a context in which all replicas assign equal values, which need no exchange."""
        return self._writing("equal")

    def copy_writes(self) -> AbstractContextManager[None]:
        """Returns a context in which assignments change this device's copy only."""
        return self._writing("copy")

    @contextmanager
    def _writing(self, manner: str) -> Generator[None]:
        before, self._writes = self._writes, manner
        try:
            yield
        finally:
            self._writes = before

    def _is_apart(self, variable: Any) -> bool:
        key = id(variable)
        return key in self._held or key in self.apart or is_on_read(variable)

    def _take_apart(self, variable: Any) -> None:
        self.apart[id(variable)] = variable

    def written_apart(self) -> dict[int, Any]:
        """Returns, by id, the written variables of which each replica holds a component."""
        return {key: one for key, one in self.variables.items() if self._is_apart(one)}

    def aggregates(self, variables: Sequence[Any], values: Sequence[Any]) -> list[Any]:
        """Returns the aggregates of variables' components, by one all-sum for all of them."""
        parts = []
        for variable, value in zip(variables, values, strict=True):
            summed = counts_all_replicas(variable) and value.dtype != bool
            parts.append(value if summed else only_first(value))
        results = []
        for variable, value, total in zip(
            variables, values, self.exchange.total(parts), strict=True
        ):
            mean = variable.aggregation == "mean"
            result = divided(total, self._replicas) if mean else total
            results.append(result.astype(value.dtype))
        return results


def current() -> ReplicaScope | None:
    """Returns the scope of the replica whose code is being traced in this thread, None if none."""
    return scopes.innermost(ReplicaScope)
