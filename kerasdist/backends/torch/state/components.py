"""Variables in custom loops, which behave as in ``tf.distribute``: mirrored or with components.

A variable with an aggregation is mirrored: when replica code assigns to it, the replicas wait for
each other, and all of them immediately get the sum, the mean or the first replica's value. Two
kinds of variables have a separate value on every replica, called a component, which persists from
one `run` to the next:

- ``synchronization="on_read"``, as for the state of Keras's metrics: the variable's own value is
  the aggregate of the components.
- no aggregation, as for the state of a seed generator or for moving statistics: the variable's own
  value is the first replica's component, as in ``tf.distribute``.

When cross-replica code assigns to such a variable, every component is made anew from the assigned
value. If the aggregation is a sum, each component becomes an equal share of that value. A worker
keeps the components of its own replicas, and also the aggregate over all workers, which
cross-replica code reads without communication.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import keras
import torch

from kerasdist import keras_compat
from kerasdist.backends.base.variable_rules import (
    counts_all_replicas,
    is_combined_on_write,
    is_on_read,
    is_sum_on_read,
    shares_of_sum,
)
from kerasdist.backends.torch.replica.placing import Version, add_up
from kerasdist.backends.torch.state.variables import ReplicaScope, Rules, commit_buffers
from kerasdist.backends.torch.workers.process_group import Group
from kerasdist.core import ownership
from kerasdist.core.context import current
from kerasdist.core.ownership import VariableTable

# The components of a variable on the replicas of this process. The version tells whether the tensor
# that Keras's variable holds has changed since: then the components are invalid.
Kept = tuple[tuple[torch.Tensor, ...], Version]


@final
class Components:
    """Keeps all variables' components, for this process's replicas of one strategy."""

    def __init__(self, group: Group, local: range, replicas: int) -> None:
        """Starts without components."""
        self._group = group
        self._local = local
        self._replicas = replicas
        self._kept: VariableTable[Kept] = VariableTable()

    def component(
        self, variable: keras.Variable, rank: int, device: torch.device | None = None
    ) -> torch.Tensor | None:
        """Returns a replica's component of a variable, None if the variable has no components."""
        own = keras_compat.stored_value(variable)
        kept = self._valid(variable, own)
        if kept is not None:
            return kept[rank - self._local.start]
        if not is_on_read(variable):
            return None
        with torch.no_grad():
            part = own
            if is_sum_on_read(variable):
                first, other = shares_of_sum(own, self._replicas)
                part = other if rank else first
            part = part.detach().to(device or own.device, copy=True)
        return part.requires_grad_(own.requires_grad)

    def has(self, variable: keras.Variable) -> bool:
        """Returns whether a variable has components."""
        own = keras_compat.stored_value(variable)
        return is_on_read(variable) or self._valid(variable, own) is not None

    def _valid(
        self, variable: keras.Variable, own: torch.Tensor
    ) -> tuple[torch.Tensor, ...] | None:
        values, version = self._kept.get(variable) or (None, None)
        return values if version is not None and version.is_of(own) else None

    @torch.no_grad()
    def keep(
        self, variables: Sequence[keras.Variable], columns: Sequence[Sequence[torch.Tensor]]
    ) -> None:
        """Stores components, and sets each variable's own value to the aggregate of its components.

        Args:
            variables: Variables that have components.
            columns: For each variable, its components on the replicas of this process.
        """
        # The indices of the variables that have an aggregate. The own value of any other variable
        # becomes equal to the first replica's component.
        shared = [
            index
            for index, variable in enumerate(variables)
            if is_on_read(variable) and variable.aggregation != "none"
        ]
        together = [values[0] for values in columns]
        totals = self.aggregates([variables[i] for i in shared], [columns[i] for i in shared])
        for index, total in zip(shared, totals, strict=True):
            together[index] = total
        for variable, values, value in zip(variables, columns, together, strict=True):
            own = keras_compat.stored_value(variable)
            own.copy_(value)
            self._kept.put(variable, (tuple(values), Version(own)))

    def aggregates(
        self, variables: Sequence[keras.Variable], columns: Sequence[Sequence[torch.Tensor]]
    ) -> list[torch.Tensor]:
        """Combines each variable's components, over all replicas, by the variable's aggregation."""
        if not variables:
            return []
        parts = [
            add_up(values) if counts_all_replicas(variable) else self._group.chiefs(values[0])
            for variable, values in zip(variables, columns, strict=True)
        ]
        count = len(columns[0]) * self._group.size
        return [
            (total / count).to(values[0].dtype)
            if variable.aggregation == "mean"
            else total.view(values[0].dtype)
            for variable, values, total in zip(
                variables, columns, self._group.sums(parts), strict=True
            )
        ]


@final
class LoopRules(Rules):
    """The rules for reads and writes of variables in the functions that `Strategy.run` calls."""

    def __init__(self, components: Components) -> None:
        self._components = components

    def own_value(
        self, scope: ReplicaScope, variable: keras.Variable, source: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Returns the replica's component, None if the variable has no components."""
        if source is None:  # a symbolic call made the variable, without a value
            with current.replica.collectives.no_replica():  # type: ignore[union-attr]
                keras_compat.initialize_waiting_variable(variable)
        return self._components.component(variable, scope.rank, scope.device)

    def assign_together(
        self, scope: ReplicaScope, variable: keras.Variable, value: torch.Tensor
    ) -> bool:
        """Combines the replicas' values immediately, by the variable's aggregation."""
        ownership.require_own(variable)
        if not is_combined_on_write(variable):
            return False
        current.replica.collectives.assign_together(variable, value)  # type: ignore[union-attr]
        scope.refresh(())
        return True

    def commit(self, scopes: Sequence[ReplicaScope], *, sums: bool) -> list[int]:
        """Keeps the components that replicas wrote; writes their aggregates to the variables.

        If `sums` is False, variables with ``synchronization="on_read"`` are left for a later call.
        """
        written: dict[int, keras.Variable] = {}
        for scope in scopes:
            written.update(scope.written)
        if not sums:
            written = {key: one for key, one in written.items() if not is_on_read(one)}
        columns = [[self._held(one, key, written[key]) for one in scopes] for key in written]
        self._components.keep(list(written.values()), columns)
        return list(written)

    def pause(self, scopes: Sequence[ReplicaScope]) -> list[int]:
        """Commits all variables, also "on_read" ones, because cross-replica code runs next."""
        return self.commit(scopes, sums=True)

    @torch.no_grad()
    def end(self, scopes: Sequence[ReplicaScope]) -> None:
        """Commits all variables; averages torch modules' buffers over this process's replicas."""
        self.commit(scopes, sums=True)
        commit_buffers(scopes)

    def _held(self, scope: ReplicaScope, key: int, variable: keras.Variable) -> torch.Tensor:
        if key in scope.written:
            return scope.state_mapping[key]
        held = self._components.component(variable, scope.rank, scope.device)
        if held is not None:
            return held
        own = keras_compat.stored_value(variable)
        return own.detach().to(scope.device, copy=True).requires_grad_(own.requires_grad)
