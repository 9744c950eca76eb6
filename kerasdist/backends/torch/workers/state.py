"""What a step's reads and writes of variables mean on a worker."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any


class StepState(abc.ABC):
    """The variables while a step runs: one kind for `fit`, one for custom loops.

    Attributes:
        writes_alike: Whether all workers assign the same now, so that nothing has to travel.
    """

    writes_alike = False

    @abc.abstractmethod
    def assign(self, variable: Any, value: Any, write: Callable[[Any, Any], Any]) -> Any:
        """Assigns in the step.

        Args:
            variable: A Keras variable.
            value: This worker's value.
            write: Keras's own assignment, of a variable and a value.
        """

    @abc.abstractmethod
    def paused(self) -> AbstractContextManager[None]:
        """Returns a context, inside a step, in which cross-replica code runs."""

    @contextmanager
    def equal_writes(self) -> Iterator[None]:
        """Returns a context in which what is assigned is equal on all workers by itself."""
        outer, self.writes_alike = self.writes_alike, True
        try:
            yield
        finally:
            self.writes_alike = outer
