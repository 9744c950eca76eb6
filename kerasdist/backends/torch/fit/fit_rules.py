"""Combines the values that replicas assign to variables in a step of `fit`.

The result equals the values that one device would assign. During the step, no replica sees the
assignments of another replica. At the end of the step each process combines the values of its
replicas, by the variable's aggregation:

- ``"sum"`` with ``synchronization="on_read"``, as for the state of metrics: the sum. In the step,
  replica 0 starts from the variable's value, and the other replicas start from zero;
- ``"sum"`` with another synchronization: every replica starts from the variable's value, and the
  replicas' changes are added to that value;
- ``"mean"``, of floats: the mean, in which a replica counts by its number of rows;
- otherwise: the first replica's value.

The buffers of torch's own modules have no aggregation. A buffer of floats gets the weighted mean,
any other buffer gets the first replica's value.

Then the workers combine the values of their processes by the same rules, in a single exchange.
Sums may be combined after a later step; until then a worker's variable holds only that worker's own
sum. Workers do not send values that are equal on all replicas anyway: those of seed generators, and
the moving statistics of a synchronized BatchNormalization.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, final

import keras
import torch

from kerasdist import keras_compat
from kerasdist.backends.base.user_places import kept_state_of
from kerasdist.backends.torch import internals
from kerasdist.backends.torch.replica.placing import move_together
from kerasdist.backends.torch.state.variables import ReplicaScope, Rules, commit_buffers
from kerasdist.backends.torch.workers.process_group import Group
from kerasdist.backends.torch.workers.reducer import GradientReducer
from kerasdist.errors import UnsupportedError

# The most work of a step that runs on one core, times the number of cores. The work is the number
# of the model's parameters times that of the batch's positions (rows times pixels or tokens). On
# two cores, such a step takes about 80 ms at most; on 16 cores, about 10 ms.
MOST_ON_ONE_CORE = 1 << 31


@final
class FitRules(Rules):
    """The rules by which the steps of one model combine the values that replicas assign.

    Attributes:
        reducer: Sums gradients over the workers during the backward pass; None if the gradients are
            summed after that pass.
        sums: In a job, the variables whose value is a sum over the workers, by their ids. At first
            these are variables of metrics. When a step assigns to another such variable, that
            variable is added.
        sums_are_parts: Whether variables with the aggregation "sum" hold only this worker's own
            sum, to which the sums of the other workers are not yet added.
    """

    is_fit = True
    reducer: GradientReducer | None = None

    def __init__(self, model: Any, group: Group, sums: Iterable[keras.Variable] = ()) -> None:
        """Counts the model's parameters, for `is_short`.

        `sums` are those variables of the model's metrics that have the aggregation "sum".
        """
        self.kept = kept_state_of(model)
        self._group = group
        self._parameters = 0
        for variable in model.weights:
            self._parameters += math.prod(variable.shape)
        self.sums = {id(variable): variable for variable in sums} if group.size > 1 else {}
        self.sums_are_parts = False
        # Variables and buffers that were combined in this process, but not yet over the workers.
        self._committed: dict[int, keras.Variable] = {}
        self._buffers: list[torch.Tensor] = []
        # The metrics' sums over the workers that `reducer` has computed together with the sums of
        # the gradients, by the variables' ids.
        self._summed: dict[int, torch.Tensor] = {}
        # In a job: the weight, in this step, of the replica of this worker (a worker has only one).
        self._weight = 1.0

    @torch.no_grad()
    def begin(self, scopes: Sequence[ReplicaScope]) -> None:
        """Starts a step.

        If the variables in `sums` have the total of all workers, they are set to zero on every
        worker except the chief. So the old total counts only once when the workers' values are
        added up again.
        """
        self._weight = scopes[0].weight
        self._committed.clear()
        self._buffers.clear()
        if self.reducer is not None:
            self.reducer.begin(scopes[0])
        if not self.sums_are_parts:
            self.sums_are_parts = True
            if self._group.rank:
                for one in keras_compat.stored_values(self.sums.values()):
                    one.zero_()

    def is_short(self, batch: object) -> bool:
        """Returns whether a step is so short that replicas in threads compute on one core each.

        On several cores, an OpenMP thread of one replica would spin on a core that the next
        replica's thread needs. The answer depends on shapes and the number of cores, not on
        measured times. So a repeated run uses equally many cores, and adds numbers in the same
        order.
        """
        positions = 0  # rows times pixels or tokens
        for leaf in keras.tree.flatten(batch):
            if isinstance(leaf, torch.Tensor):
                sizes = leaf.shape[:-1] if leaf.is_floating_point() else leaf.shape
                positions = max(positions, math.prod(sizes))
        return self._parameters * positions * torch.get_num_threads() < MOST_ON_ONE_CORE

    def own_value(
        self, scope: ReplicaScope, variable: keras.Variable, source: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Returns zeros if a replica starts from them; None if it starts from the variable's value.

        Zeros are for sums, such as those of metrics, on every replica except the first. In a job,
        `begin` has already set the variables in `sums` to zero there, so for these the result is
        None.
        """
        if source is None:
            raise UnsupportedError(
                "Expected every variable to exist before the replicas run. Received: "
                f"variable={variable.path!r}, made inside a step. Make it in the layer's `build` "
                "or `__init__`, or call the model once on a batch before you train it."
            )
        if scope.rank and id(variable) not in self.sums and not self._adds_changes(variable):
            return torch.zeros_like(source, device=scope.device, requires_grad=False)
        return None

    @torch.no_grad()
    def commit(self, scopes: Sequence[ReplicaScope], *, sums: bool) -> list[int]:
        """Writes the assigned values into the variables, combined by each one's ``aggregation``.

        Variables with the aggregation "sum" are written only if `sums` is True.
        """
        written: dict[int, keras.Variable] = {}
        for scope in scopes:
            for key, variable in scope.written.items():
                if sums or variable.aggregation != "sum":
                    written[key] = variable
        if written:
            targets = keras_compat.stored_values(written.values())
            values = combined(scopes, written, targets, self._adds_changes)
            internals.COPY_TO_EACH.value(targets, values)
            equal = scopes[0].written_equal
            self._committed.update({key: written[key] for key in written if key not in equal})
        return list(written)

    def _adds_changes(self, variable: keras.Variable) -> bool:
        """Returns whether all replicas start from a variable's value and their changes are added.

        Returns False for compiled code, which overwrites the value that the changes start from.
        """
        if variable.aggregation != "sum" or variable.synchronization == "on_read":
            return False
        return self.compiled is None and keras_compat.stored_dtype(variable) != "bool"

    def pause(self, scopes: Sequence[ReplicaScope]) -> list[int]:
        """Makes variables equal on all workers, because cross-replica code is about to run.

        Variables with the aggregation "sum" are left out.
        """
        written = self.commit(scopes, sums=False)
        self.exchange(sums=False)
        return written

    @torch.no_grad()
    def end(self, scopes: Sequence[ReplicaScope]) -> None:
        """Combines the values of this process's replicas.

        Afterwards the caller must call `exchange`, which combines the values of all workers.
        """
        self.commit(scopes, sums=True)
        self._buffers += commit_buffers(scopes)
        if self.reducer is not None:
            self._summed = self.reducer.end(scopes[0])

    @torch.no_grad()
    def exchange(
        self, logs: Sequence[torch.Tensor] = (), *, sums: bool = True
    ) -> list[torch.Tensor]:
        """Makes the variables equal on all workers; returns each of `logs` summed over the workers.

        If `sums` is False, variables whose value is a sum over the workers, such as those of
        metrics, keep only this worker's own sum.
        """
        committed, self._committed = list(self._committed.values()), {}
        buffers, self._buffers = self._buffers, []
        summed, self._summed = self._summed if sums else {}, {}
        if self._group.size == 1:
            return list(logs)
        means, others, changed = [], [], []
        for variable, value in zip(committed, keras_compat.stored_values(committed), strict=True):
            if self._adds_changes(variable):
                changed.append(value)
            elif variable.aggregation == "sum":
                self.sums[id(variable)] = variable
            else:
                is_mean = variable.aggregation == "mean" and value.is_floating_point()
                (means if is_mean else others).append(value)
        for buffer in buffers:
            (means if buffer.is_floating_point() else others).append(buffer)
        if summed:
            known = keras_compat.stored_values([self.sums[key] for key in summed])
            internals.COPY_TO_EACH.value(known, [*summed.values()])
        unsummed = [one for key, one in self.sums.items() if key not in summed] if sums else []
        totals = keras_compat.stored_values(unsummed)
        self.sums_are_parts = self.sums_are_parts and not sums
        parts = [
            *totals,
            *changed,
            *(one * self._weight for one in means),
            *(self._group.chiefs(one) for one in others),
        ]
        targets = [*totals, *changed, *means, *others]
        results = self._group.sums([*parts, *logs])
        if targets:
            found = [one.view(target.dtype) for one, target in zip(results, targets, strict=False)]
            internals.COPY_TO_EACH.value(targets, found)
        return results[len(targets) :]


def combined(
    scopes: Sequence[ReplicaScope],
    written: Mapping[int, keras.Variable],
    targets: Sequence[torch.Tensor],
    adds_changes: Callable[[keras.Variable], bool],
) -> list[torch.Tensor]:
    """Returns what replicas assigned to variables, combined by each variable's aggregation."""
    stored = dict(zip(written, targets, strict=True))
    values: dict[int, torch.Tensor] = {}
    for scope in scopes:
        equal = scope.written_equal
        brought: dict[int, torch.Tensor] = {}
        for key in scope.written:
            # If the replicas' values are equal, the first replica's value is enough.
            if key in stored and not (key in values and key in equal):
                brought[key] = scope.state_mapping[key].detach()
        here = move_together(targets[0].device, list(brought.values()))
        for key, value in zip(brought, here, strict=True):
            target, aggregation = stored[key], written[key].aggregation
            own = value.to(target.device)
            if aggregation == "sum":
                # Replica 0 gives its new value; the others give only what they have added.
                if scope.rank and key not in equal and adds_changes(written[key]):
                    own = own - target
                values[key] = own if scope is scopes[0] else values.get(key, target) + own
            elif aggregation == "mean" and target.is_floating_point() and key not in equal:
                # `weight` is a replica's fraction of the rows. The mean is over the replicas that
                # assigned to the variable, so the divisor is the sum of only their weights.
                own = own * (scope.weight / sum(one.weight for one in scopes if key in one.written))
                values[key] = values[key] + own if key in values else own
            else:
                values.setdefault(key, own)
    return list(map(values.__getitem__, written))
