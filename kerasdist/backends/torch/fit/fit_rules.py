"""How a step of `fit` combines what replicas assign to variables, for contract C1.

A replica keeps what it assigns until the step ends. Then the values of a process's replicas are
combined, by the variable's aggregation:

- ``"sum"``, as the state of metrics: the sum; replica 0 starts from the value before the step, the
  others from zero;
- ``"mean"``, of floats: the mean, weighted by the replicas' shares of the examples;
- any other: the first replica's value;
- buffers of torch's own modules, which have no aggregation: the weighted mean.

Then the workers combine their values likewise, in one message per step. Sums may wait for a later
step; until then the variable holds this worker's part. Values that all replicas compute alike are
not sent: seed generators, and the moving statistics of a synchronized BatchNormalization.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, final

import torch

from kerasdist import keras_compat
from kerasdist.backends.torch.replica.placing import moved_together
from kerasdist.backends.torch.state.variables import (
    ReplicaScope,
    Rules,
    commit_buffers,
    mean,
)
from kerasdist.backends.torch.workers.group import Group
from kerasdist.errors import UnsupportedError


@final
class FitRules(Rules):
    """The rules for the steps of one model.

    Attributes:
        sums_are_parts: Whether variables that are sums hold only this worker's part.
    """

    is_fit = True

    def __init__(self, group: Group, sums: Iterable[Any] = (), alike: Iterable[Any] = ()) -> None:
        """Takes the sums that steps write, and variables that all replicas assign equal values."""
        self._group = group
        self._sums = {id(variable): variable for variable in sums} if group.size > 1 else {}
        self._alike = {id(variable): weakref.ref(variable) for variable in alike}
        self.sums_are_parts = False
        # Variables and buffers that were combined in this process, not yet over the workers.
        self._committed: dict[int, Any] = {}
        self._buffers: list[torch.Tensor] = []
        self._weight = 1.0

    @torch.no_grad()
    def begin(self, scopes: Sequence[ReplicaScope]) -> None:
        """Starts a step: sums become parts, which start from zero on all workers but the chief."""
        self._weight = sum(scope.weight for scope in scopes)
        self._committed.clear()
        self._buffers.clear()
        if self.reducer is not None:
            self.reducer.begin(scopes[0])
        if not self.sums_are_parts:
            self.sums_are_parts = True
            if self._group.rank and self._sums:
                torch._foreach_zero_(_stored(self._sums.values()))

    def own_value(
        self, scope: ReplicaScope, variable: Any, source: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Returns zeros for a sum, except on replica 0; None: the replica reads the variable."""
        if source is None:
            raise UnsupportedError(
                "Expected every variable to exist before the replicas run. Received: "
                f"variable={variable.path!r}, made inside a step. Make it in the layer's `build` "
                "or `__init__`, or call the model once on a batch before you train it."
            )
        if scope.rank and variable.aggregation == "sum" and id(variable) not in self._sums:
            return torch.zeros_like(source, device=scope.device, requires_grad=False)
        return None

    def assign_together(self, scope: ReplicaScope, variable: Any, value: torch.Tensor) -> bool:
        """Returns False: the replicas' values are combined in `commit`."""
        del scope, variable, value
        return False

    @torch.no_grad()
    def commit(self, scopes: Sequence[ReplicaScope], *, sums: bool) -> list[int]:
        """Writes what the replicas assigned, combined by each variable's ``aggregation``."""
        written: dict[int, Any] = {}
        for scope in scopes:
            written.update(scope.written)
        if not sums:
            written = {
                key: variable for key, variable in written.items() if variable.aggregation != "sum"
            }
        if written:
            targets = _stored(written.values())
            brought = [_brought(one, written, scopes[0], targets[0].device) for one in scopes]
            values = [
                _combined(key, variable, target, scopes, brought)
                for (key, variable), target in zip(written.items(), targets, strict=True)
            ]
            torch._foreach_copy_(targets, values)
            for key, variable in written.items():
                known = self._alike.get(key)
                if key not in scopes[0].written_equal and (
                    known is None or known() is not variable
                ):
                    self._committed[key] = variable
        return list(written)

    def pause(self, scopes: Sequence[ReplicaScope]) -> list[int]:
        """Makes all but the sums equal on all workers, before cross-replica code runs."""
        written = self.commit(scopes, sums=False)
        self.exchange(sums=False)
        return written

    @torch.no_grad()
    def end(self, scopes: Sequence[ReplicaScope]) -> None:
        """Ends a step in this process; the caller then calls `exchange`."""
        self.commit(scopes, sums=True)
        self._buffers += commit_buffers(scopes)

    @torch.no_grad()
    def exchange(
        self, logs: Sequence[torch.Tensor] = (), *, sums: bool = True
    ) -> list[torch.Tensor]:
        """Makes the variables equal on all workers, in one message. Returns the sums of `logs`."""
        committed, self._committed = list(self._committed.values()), {}
        buffers, self._buffers = self._buffers, []
        if self._group.size == 1:
            return list(logs)
        self._sums.update({id(one): one for one in committed if one.aggregation == "sum"})
        totals = _stored(self._sums.values()) if sums else []
        self.sums_are_parts = self.sums_are_parts and not sums
        means, others = [], []
        for variable, value in zip(committed, _stored(committed), strict=True):
            if variable.aggregation != "sum":
                is_mean = variable.aggregation == "mean" and value.is_floating_point()
                (means if is_mean else others).append(value)
        for buffer in buffers:
            (means if buffer.is_floating_point() else others).append(buffer)
        parts = [
            *totals,
            *(one * self._weight for one in means),
            *(self._group.chiefs(one) for one in others),
        ]
        targets = [*totals, *means, *others]
        if not parts and not logs:
            return []
        results = self._group.sums([*parts, *logs])
        if targets:
            found = [one.view(target.dtype) for one, target in zip(results, targets, strict=False)]
            torch._foreach_copy_(targets, found)
        return results[len(targets) :]


def _stored(variables: Iterable[Any]) -> list[torch.Tensor]:
    return [value.detach() for value in keras_compat.stored_values(variables)]


def _brought(
    scope: ReplicaScope, written: Mapping[int, Any], first: ReplicaScope, device: torch.device
) -> dict[int, torch.Tensor]:
    """Returns what a replica assigned, on a device, by the variable's id."""
    own = [key for key in written if key in scope.written]
    if scope is not first:  # of equal values, the first replica's are enough
        own = [key for key in own if key not in scope.written_equal or key not in first.written]
    values = [scope.state_mapping[key].detach() for key in own]
    return dict(zip(own, moved_together(device, values), strict=True))


def _combined(
    key: int,
    variable: Any,
    target: torch.Tensor,
    scopes: Sequence[ReplicaScope],
    brought: Sequence[Mapping[int, torch.Tensor]],
) -> torch.Tensor:
    parts = [one[key].to(target.device) for one in brought if key in one]
    if variable.aggregation == "sum":
        # Replica 0 started from the value itself, the others from zero.
        total = parts[0] if key in brought[0] else target + parts[0]
        for part in parts[1:]:
            total = total + part
        return total
    if variable.aggregation == "mean" and target.is_floating_point():
        weights = [scope.weight for scope, one in zip(scopes, brought, strict=True) if key in one]
        return mean(parts, weights)
    return parts[0]
