"""The variables in the code of one replica, by the rules of ``tf.distribute``."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, final

from jax import numpy as jnp

from kerasdist import context
from kerasdist.backends.jax import scopes
from kerasdist.backends.jax.components import divided
from kerasdist.backends.jax.exchange import Exchange, only_first
from kerasdist.backends.jax.scopes import Scope


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


def current() -> ReplicaScope | None:
    """Returns the scope of the replica whose code is being traced in this thread, None if none."""
    return scopes.innermost(ReplicaScope)
