"""Variables in the custom loops of many workers (contract C2).

What each replica holds for itself (``synchronization="on_read"``, as the state of metrics) stands
in the variable while the worker's replica runs, and is kept aside while it does not: then the
variable holds the aggregate over the workers, so that whoever reads it needs nobody else. Variables
that name an aggregation are combined when they are assigned to. All others are this worker's own.
The meaning is that of `kerasdist.backends.torch.components`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch

from kerasdist import keras_seam
from kerasdist.backends.torch.components import equal_share, is_on_read, require_floats_for_mean
from kerasdist.backends.torch.variables import is_sum
from kerasdist.backends.torch.workers.group import Group
from kerasdist.backends.torch.workers.state import StepState


@final
@dataclass(frozen=True, eq=False)
class Kept:
    """This worker's component of a variable, and the variable's own value that goes with it.

    Attributes:
        component: The component.
        own: Where the variable keeps its own value.
        version: How often that had been changed.
    """

    component: torch.Tensor
    own: torch.Tensor
    version: int

    def serves(self, own: torch.Tensor) -> bool:
        """Returns whether the variable's own value is still the one that goes with this.

        Args:
            own: Where the variable keeps its own value now.
        """
        return own is self.own and own._version == self.version


@final
class LoopState(StepState):
    """The variables of one strategy that its replicas hold each for itself."""

    def __init__(self, group: Group) -> None:
        """Starts with none.

        Args:
            group: The workers.
        """
        self._group = group
        self._known: dict[int, weakref.ref[Any]] = {}
        self._kept: dict[int, Kept] = {}
        # While the replica runs: the aggregates of the variables that hold a component.
        self._aside: dict[int, tuple[Any, torch.Tensor | None]] = {}
        self._written: dict[int, Any] = {}

    def note(self, variable: Any) -> None:
        """Notes a variable that was made in the strategy's scope.

        Args:
            variable: A Keras variable.
        """
        if not has_component(variable):
            return
        key = id(variable)

        def forget(_: Any) -> None:
            self._known.pop(key, None)
            self._kept.pop(key, None)

        self._known[key] = weakref.ref(variable, forget)
        if self._running:
            self._aside[key] = (variable, None)
            self._written[key] = variable

    _running = False

    @contextmanager
    def running(self) -> Iterator[None]:
        """Returns a context in which the worker's replica runs."""
        self._enter()
        self._running = True
        try:
            yield
        except BaseException:
            self._written.clear()
            raise
        finally:
            self._running = False
            self._leave()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Returns a context, inside `running`, in which cross-replica code runs."""
        self._running = False
        self._leave()
        try:
            yield
        finally:
            self._enter()
            self._running = True

    def component(self, variable: Any) -> torch.Tensor:
        """Returns what this worker's replica holds of a variable.

        Args:
            variable: A Keras variable that has a value.
        """
        own = keras_seam.stored_value(variable).detach()
        if not has_component(variable) or id(variable) in self._aside:
            return own
        kept = self._kept.get(id(variable))
        if kept is not None and kept.serves(keras_seam.stored_value(variable)):
            return kept.component
        if is_sum(variable):
            return equal_share(own, self._group.rank, self._group.size)
        return own.clone()

    def assign(self, variable: Any, value: Any, write: Callable[[Any, Any], Any]) -> Any:
        """Assigns in the replica's code.

        Args:
            variable: A Keras variable.
            value: This worker's value.
            write: Keras's own assignment.

        Raises:
            ValueError: For a mean of numbers that are not floats.
        """
        if self.writes_alike or variable.aggregation == "none":
            return write(variable, value)
        if is_on_read(variable):
            key = id(variable)
            if key not in self._aside:  # made outside of the scope: not known before
                own = keras_seam.stored_value(variable).detach()
                if is_sum(variable):
                    value = value - own + self.component(variable)
                self._known.setdefault(key, weakref.ref(variable))
                self._aside[key] = (variable, None)
            self._written[key] = variable
            return write(variable, value)
        require_floats_for_mean(variable, value)
        [total] = self.aggregates([variable], [value.detach()])
        return write(variable, total)

    def aggregates(
        self, variables: list[Any], components: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Returns each variable's components combined over the workers.

        Args:
            variables: Keras variables.
            components: This worker's component of each.
        """
        parts = [
            one
            if variable.aggregation in ("sum", "mean") or self._group.rank == 0
            # All variables travel in one sum, to which the others add nothing here.
            else torch.zeros_like(one)
            for variable, one in zip(variables, components, strict=True)
        ]
        bits = [one.view(torch.uint8) if one.dtype == torch.bool else one for one in parts]
        return [
            (total / self._group.size).to(one.dtype)
            if variable.aggregation == "mean"
            else total.view(one.dtype)
            for variable, one, total in zip(variables, parts, self._group.sums(bits), strict=True)
        ]

    @torch.no_grad()
    def keep(self, variable: Any, component: torch.Tensor, aggregate: torch.Tensor) -> None:
        """Keeps this worker's component, and makes the variable's own value the aggregate.

        Args:
            variable: A Keras variable.
            component: What this worker's replica holds of it.
            aggregate: The workers' components, combined.
        """
        own = keras_seam.stored_value(variable)
        own.copy_(aggregate)
        self._kept[id(variable)] = Kept(component, own, own._version)

    @torch.no_grad()
    def _enter(self) -> None:
        self._aside.clear()
        self._written.clear()
        for key, known in list(self._known.items()):
            variable = known()
            own = None if variable is None else keras_seam.stored_value(variable)
            if own is None:
                continue
            component = self.component(variable)
            self._aside[key] = (variable, own.detach().clone())
            own.copy_(component)

    @torch.no_grad()
    def _leave(self) -> None:
        written = list(self._written.values())
        components = [keras_seam.stored_value(one).detach().clone() for one in written]
        totals = self.aggregates(written, components) if written else []
        aside, self._aside = self._aside, {}
        for variable, component, total in zip(written, components, totals, strict=True):
            self.keep(variable, component, total)
        for key, (variable, aggregate) in aside.items():
            if key not in self._written and aggregate is not None:
                own = keras_seam.stored_value(variable)
                self.keep(variable, own.detach().clone(), aggregate)
        self._written.clear()


def has_component(variable: Any) -> bool:
    """Returns whether a variable's value is the aggregate of what the replicas hold of it.

    Args:
        variable: A Keras variable.
    """
    return is_on_read(variable) and variable.aggregation != "none"
