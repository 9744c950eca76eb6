"""Runs replicas whose local batches differ in size, as in the last batch of an epoch, on JAX.

JAX runs one program on all devices, with one shape for each array. So the code of the replicas is
traced once for each size of local batch, with batches cut to that size. Every device computes all
these traces and selects the result for the size of its own batch. A batch that is divided as evenly
as possible has at most two sizes.

Replicas exchange values while they compute. So the code for each size is traced up to its next
exchange, and this trace is abandoned. When the code for all sizes has reached this exchange, the
values are exchanged. The code for each size is then traced again from the beginning, now with the
result of the exchange. The abandoned traces are dead code, which XLA drops.

Because every device computes the code for each size, a batch with two sizes takes the time of two
steps. Each different shape of the arguments counts as a size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, final

import jax
from jax import numpy as jnp

from kerasdist.backends.base.checks import differing_calls
from kerasdist.backends.jax.loops import scopes
from kerasdist.backends.jax.loops.replica_scope import Differentiated, Exchange, ReplicaScope
from kerasdist.backends.jax.mesh.arrays import cut, is_array, largest_of, padded
from kerasdist.backends.jax.mesh.layout import AXIS
from kerasdist.core.context import current, replica_scope
from kerasdist.errors import UnsupportedError


@dataclass(frozen=True)
class Traced:
    """The code of a replica, traced to its end.

    Attributes:
        scope: The scope through which the code used variables.
        results: The leaves of the code's result.
        form: The structure of these leaves.
    """

    scope: ReplicaScope
    results: list[Any]
    form: Any


# A function that traces the code of one group of replicas, whose arguments have the same shapes. It
# takes the group's number and an `Exchange`.
Trace = Callable[[int, Exchange], Traced]


@dataclass(eq=False)
class _Pause(BaseException):  # not an Exception, which user code may catch
    """Raised when a replica's code reaches an exchange whose result is not known yet."""

    kind: str
    scope: Any
    brought: Sequence[Any]
    how: Any


class _Inside(BaseException):
    """Raised when a function that is differentiated reaches an exchange between replicas."""


@final
class _Replay(Exchange):
    """Gives a replica's code the results of the exchanges that have already been made.

    At the first exchange that has not been made yet, it raises `_Pause`.
    """

    def __init__(self, results: Sequence[tuple[str, Sequence[Any]]], group: int) -> None:
        self._results = results
        self._group = group
        self._position = 0
        self._derivatives = 0

    def total(self, tensors: Sequence[Any]) -> list[Any]:
        """Returns the sums over the replicas, or raises `_Pause` if they are not known yet."""
        return self._next("an all-reduce", None, tensors, None) if tensors else []

    def gather(self, tensor: Any, axis: int) -> Any:
        """Returns the gathered tensors, or raises `_Pause` if they are not known yet."""
        return self._next("all_gather", None, [tensor], axis)

    def merge(self, scope: Any, leaves: Sequence[Any], call: Callable[[list[Any]], Any]) -> Any:
        """Returns the result of `call`, or raises `_Pause` if it is not known yet.

        Also stores the values that `call` has assigned to variables.
        """
        result, written, apart = self._next("merge_call", scope, leaves, call)
        for variable, value in written:
            scope.store(variable, value, None)
        scope.apart.update(apart)
        return result

    def differentiated(
        self, scope: Any, alone: Callable[[], Differentiated], joint: Any, by: Any
    ) -> Differentiated:
        """Differentiates this group's code.

        If the code exchanges values, the code of all groups is differentiated together.
        """
        if scopes.current() is not self.base:
            return alone()
        self._derivatives += 1
        kind = f"value_and_grad number {self._derivatives}"
        if not any(kind == known for known, _ in self._results):
            try:
                return alone()
            except _Inside:
                pass
        return self._next(kind, scope, by, (*joint, current.replica))

    def _next(self, kind: str, scope: Any, brought: Sequence[Any], how: Any) -> Any:
        if scopes.current() is not self.base:
            raise _Inside
        if self._position == len(self._results):
            raise _Pause(kind, scope, brought, how)
        self._position += 1
        return self._results[self._position - 1][1][self._group]


@final
class Groups:
    """Traces the code of replicas, which are grouped by the shapes of their arguments."""

    def __init__(self, shapes: Sequence[Any]) -> None:
        self.kinds = list(dict.fromkeys(shapes))
        self.of = [self.kinds.index(one) for one in shapes]

    def run(self, trace: Trace) -> tuple[Traced, dict[int, Any], dict[int, tuple[Any, ...]]]:
        """Traces the code for each group, and selects the results of each device's own group.

        Returns three things. The first is the trace of the first group, but with the results of
        each device's own group, which are padded if their shapes differ. The second is a dict of
        the variables that the code wrote and of which each replica has its own component: it maps
        the variable's id to this replica's component. The third is a dict of the padded results: it
        maps the index of a result to its shapes on all replicas.
        """
        ends: list[Traced] = self._ends(trace)
        first = ends[0]
        if any(end.form != first.form for end in ends):
            self._disagree(f"results={[str(end.form) for end in ends]}")
        results = list(first.results)
        shapes: dict[int, tuple[Any, ...]] = {}
        for place, column in enumerate(zip(*(end.results for end in ends), strict=True)):
            if not self._differ(column):
                continue
            arrays = [jnp.asarray(one) for one in column]
            if len({one.shape for one in arrays}) > 1:
                shapes[place] = tuple(arrays[group].shape for group in self.of)
                arrays = _alike(arrays)
            results[place] = self._own(arrays)
        held = {
            key: self._own([end.scope.peek(variable) for end in ends])
            for key, variable in first.scope.written_apart().items()
        }
        return Traced(first.scope, results, first.form), held, shapes

    def _differ(self, column: Sequence[Any]) -> bool:
        """Returns whether each device must select its own group's value of a result.

        It must if the values are arrays, or numbers that differ.
        """
        if any(map(is_array, column)):
            return True
        if all(isinstance(one, str) for one in column) and len(set(column)) > 1:
            self._disagree(f"results={column!r:.200}")
        return all(isinstance(one, bool | int | float) for one in column) and len(set(column)) > 1

    def _ends(self, trace: Callable[[int, Exchange], Any]) -> list[Any]:
        """Traces the code of each group to its end, and makes all exchanges on the way."""
        results: list[tuple[str, Sequence[Any]]] = []
        while True:
            ends: list[Any] = []
            pauses: list[_Pause] = []
            for group in range(len(self.kinds)):
                try:
                    ends.append(trace(group, _Replay(results, group)))
                except _Pause as pause:
                    pauses.append(pause)
            if not pauses:
                return ends
            if ends or len({(pause.kind, len(pause.brought)) for pause in pauses}) > 1:
                calls = [p.kind for p in pauses] + ["the end of the function"] * len(ends)
                self._disagree(f"calls={calls}")
            results.append((pauses[0].kind, self._exchanged(pauses)))

    def _exchanged(self, pauses: Sequence[_Pause]) -> Sequence[Any]:
        """Makes the exchange at which all groups have paused; returns each group's result."""
        first = pauses[0]
        columns = list(zip(*(pause.brought for pause in pauses), strict=True))
        match first.kind:
            case "an all-reduce":
                result: Any = Exchange().total([self._own(column) for column in columns])
            case "all_gather":
                result = self._gathered(columns[0], first.how)
            case "merge_call":
                result = self._merged(pauses, columns)
            case _:
                return self._derived(pauses, [self._own(column) for column in columns])
        return [result] * len(self.kinds)

    def _merged(self, pauses: Sequence[_Pause], columns: Sequence[Any]) -> Any:
        """Calls the function of a merge_call once for all replicas.

        Returns three things: the function's result; the variables that the function wrote, each
        with its new value; and the variables of which each replica has its own component.
        """
        first = pauses[0]
        if isinstance(first.scope.exchange.base, scopes.OverlayScope):
            raise UnsupportedError(
                "Expected batches of one size on all replicas, where the function that is "
                "differentiated calls merge_call. Received: arguments of the shapes "
                f"{self.kinds}. On JAX give batches that can be divided evenly, for example with "
                "drop_remainder=True."
            )
        apart = {key for p in pauses for key in (*p.scope.written_apart(), *p.scope.apart)}
        states = [pause.scope.state_mapping for pause in pauses]
        every = {key: value for state in states for key, value in state.items()}
        values = {k: self._own([s.get(k, value) for s in states]) for k, value in every.items()}
        scope = first.scope.beside(values, Exchange(), apart)
        with scope, replica_scope(None):
            leaves = [self._own(one) if self._differ(one) else one[0] for one in columns]
            result = first.how(leaves)
        written = [(one, scope.state_mapping[key]) for key, one in scope.variables.items()]
        return result, written, scope.apart

    def _derived(self, pauses: Sequence[_Pause], by: list[Any]) -> Sequence[Differentiated]:
        """Differentiates the code of all groups together, because the groups exchange values.

        Each device gets the value and the derivatives of its own group.
        """
        notes: list[Any] = []

        def joint(values: list[Any]) -> tuple[Any, Any]:
            def trace(group: int, exchange: Exchange) -> Any:
                scope = pauses[group].scope
                overlay, call, replica = pauses[group].how
                scope.exchange = exchange
                inner = overlay(values, scope)
                exchange.base = inner
                with scope, replica_scope(replica):
                    return call(inner)

            ends = self._ends(trace)
            notes.append([note for _, _, note in ends])
            return self._own([value for value, _, _ in ends]), [
                (value, parts) for value, parts, _ in ends
            ]

        (_, parts), gradients = jax.value_and_grad(joint, has_aux=True)(by)
        return [
            Differentiated(value, gradients, part, note)
            for (value, part), note in zip(parts, notes[-1], strict=True)
        ]

    def _gathered(self, column: Sequence[Any], axis: int) -> Any:
        shapes = [tuple(column[group].shape) for group in self.of]
        if len({(*shape[:axis], *shape[axis + 1 :]) for shape in shapes}) > 1:
            self._disagree(f"all_gather along axis {axis} of tensors of shapes={shapes}")
        everyone = jax.lax.all_gather(self._own(_alike(column)), AXIS)
        return jnp.concatenate([cut(everyone[i], shape) for i, shape in enumerate(shapes)], axis)

    def _own(self, column: Sequence[Any]) -> Any:
        """Selects, on each device, the array of the group to which the device's replica belongs."""
        first = column[0]
        if all(one is first for one in column):
            return first
        if len({(one.shape, one.dtype) for one in column}) > 1:
            self._disagree(f"shapes={[tuple(one.shape) for one in column]}")
        group = jnp.asarray(self.of)[jax.lax.axis_index(AXIS)]
        chosen = first
        for index, one in enumerate(column[1:], start=1):
            chosen = jnp.where(group == index, one, chosen)
        return chosen

    def _disagree(self, received: str) -> NoReturn:
        raise differing_calls(f"{received}, of replicas with arguments of shapes={self.kinds}")


def _alike(arrays: Sequence[Any]) -> list[Any]:
    """Pads arrays to one common shape."""
    if len({one.ndim for one in arrays}) > 1:
        return list(arrays)  # `Groups._own` reports arrays of different ranks
    shape = largest_of([one.shape for one in arrays])
    return [padded(one, shape) for one in arrays]
