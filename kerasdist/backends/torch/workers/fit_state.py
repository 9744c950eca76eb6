"""What a step of `fit` leaves in a worker's variables, made equal again on all workers.

A worker has one replica, so replica code reads and writes the variables themselves. When the step
ends, all that was written apart travels in one message:

- a sum (aggregation ``"sum"``, as the state of metrics): during the step it holds this worker's
  part, after it the sum. The chief's part starts from the value before, the others' from zero.
- a mean (``"mean"``, floats): the workers' values, each by its share of the examples;
- any other variable: the chief's value. What all workers compute alike stays where it is: seed
  generators, and the moving statistics of a synchronized BatchNormalization.
- buffers of torch's own modules: their mean over the examples.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, final

import torch

from kerasdist import keras_seam
from kerasdist.backends.torch.variables import is_sum
from kerasdist.backends.torch.workers.group import Group
from kerasdist.backends.torch.workers.state import StepState


@final
class FitState(StepState):
    """The variables that the steps of one model write."""

    def __init__(self, group: Group, sums: Iterable[Any], alike: Iterable[Any]) -> None:
        """Makes the state.

        Args:
            group: The workers.
            sums: The variables that are known to hold sums; others are found when they are written.
            alike: Variables to which all workers assign the same by themselves.
        """
        self._group = group
        self._sums = {id(variable): variable for variable in sums}
        self._alike = {id(variable): weakref.ref(variable) for variable in alike}
        self._first_sums: dict[int, tuple[Any, torch.Tensor]] = {}
        self._means: dict[int, Any] = {}
        self._chiefs: dict[int, Any] = {}
        self._buffers: dict[int, torch.Tensor] = {}
        self._weight = 1.0
        self._sums_are_parts = False

    @torch.no_grad()
    def begin(self, weight: float) -> None:
        """Starts a step: sums become parts.

        Args:
            weight: This worker's share of the examples.
        """
        self._weight = weight
        self._forget()
        if self._sums_are_parts:
            return
        self._sums_are_parts = True
        targets = self._targets()
        if self._group.rank and targets:
            torch._foreach_zero_(targets)

    def assign(self, variable: Any, value: Any, write: Callable[[Any, Any], Any]) -> Any:
        """Assigns in the step.

        Args:
            variable: A Keras variable.
            value: This worker's value.
            write: Keras's own assignment.
        """
        key = id(variable)
        if is_sum(variable):
            if key not in self._sums and key not in self._first_sums:
                before = keras_seam.stored_value(variable).detach().clone()
                self._first_sums[key] = (variable, before)
        elif variable.aggregation == "mean" and _is_float(variable):
            self._note(self._means, variable)
        else:
            self._note(self._chiefs, variable)
        return write(variable, value)

    def note_buffers(self, buffers: Iterable[torch.Tensor]) -> None:
        """Notes buffers that a torch module may change in the step.

        Args:
            buffers: The module's buffers.
        """
        for buffer in buffers:
            self._buffers[id(buffer)] = buffer

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Returns a context in which cross-replica code runs; sums stay parts."""
        self._combine((), ())
        yield

    def end(
        self, logs: Sequence[torch.Tensor] = (), *, keep_parts: bool = False
    ) -> list[torch.Tensor]:
        """Ends a step: makes the variables equal on all workers.

        Args:
            logs: Numbers of this worker to add up, on the way.
            keep_parts: Whether to leave sums in parts until `settle`, as nobody looks at them.

        Returns:
            The sums of `logs`.
        """
        for key, (variable, before) in self._first_sums.items():
            if self._group.rank:
                keras_seam.stored_value(variable).detach().sub_(before)
            self._sums[key] = variable
        self._first_sums.clear()
        if keep_parts:
            return self._combine((), logs)
        self._sums_are_parts = False
        return self._combine(self._targets(), logs)

    def settle(self) -> None:
        """Adds up the sums, if they are in parts. All workers must call it."""
        if self._sums_are_parts:
            self.end()

    @torch.no_grad()
    def _combine(
        self, sums: Sequence[torch.Tensor], logs: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        means = [*map(_stored, self._means.values())]
        chiefs = [*map(_stored, self._chiefs.values())]
        for buffer in self._buffers.values():
            (means if buffer.is_floating_point() else chiefs).append(buffer)
        bits = [_summable(one) for one in chiefs]
        targets = [*sums, *means, *bits]
        parts = [
            *sums,
            *(one * self._weight for one in means),
            *(torch.zeros_like(one) if self._group.rank else one for one in bits),
        ]
        for noted in (self._means, self._chiefs, self._buffers):
            noted.clear()
        if not parts and not logs:
            return []
        totals = self._group.sums([*parts, *logs])
        if targets:
            torch._foreach_copy_(targets, totals[: len(targets)])
        return totals[len(targets) :]

    def _targets(self) -> list[torch.Tensor]:
        return [*map(_stored, self._sums.values())]

    def _note(self, written: dict[int, Any], variable: Any) -> None:
        known = self._alike.get(id(variable))
        if not self.writes_alike and (known is None or known() is not variable):
            written[id(variable)] = variable

    def _forget(self) -> None:
        for noted in (self._first_sums, self._means, self._chiefs, self._buffers):
            noted.clear()


def _stored(variable: Any) -> torch.Tensor:
    return keras_seam.stored_value(variable).detach()


def _is_float(variable: Any) -> bool:
    return keras_seam.stored_value(variable).is_floating_point()


def _summable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or its bits: torch adds no booleans."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor
