"""A trial takes a training step to see what it computes, and undoes all its effects."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import keras

from kerasdist.input import sharding

# Called in place of a random function. Takes its name, a function that draws, and its first
# argument. Returns that argument unchanged if the draw would only drop, scale or reorder it.
Draw = Callable[[str, Callable[[], Any], Any], Any]


@dataclass(frozen=True, eq=False)
class TriedBatch:
    """The batch of a trial.

    Attributes:
        given: As the trainer's step takes it: a global batch, or this worker's part of one.
        whole: The global batch, for one device.
        sizes: How many examples each replica gets of it, on all workers.
    """

    given: Any
    whole: Any
    sizes: Sequence[int]

    @property
    def examples(self) -> int:
        """How many examples the global batch has."""
        return sum(self.sizes)

    @property
    def weights(self) -> list[float]:
        """Each replica's share of the examples."""
        return [size / self.examples for size in self.sizes]


def examples(batch: Any) -> int:
    """Returns how many examples a global batch has, 0 if it has no array with rows."""
    sizes = [leaf.shape[0] for leaf in keras.tree.flatten(batch) if sharding.has_rows(leaf)]
    return int(sizes[0] or 0) if sizes else 0


class Trial(abc.ABC):
    """Takes a model's training step on one device, and divided over the replicas.

    It is a context manager: `restore`, and its end, undo what the steps inside have written.
    """

    # Whether code can record a step's intermediate results and replace its random draws.
    sees_inside = True

    def __init__(self, model: Any) -> None:
        self._model = model

    def take(self, batch: Any) -> Any:
        """Takes the model's own training step."""
        return self._model.train_step(batch)

    def gathered(self, batch: Any, *, spares: bool) -> TriedBatch:
        """Returns a batch with the examples of all replicas, in their order.

        All workers must call it.
        """
        sizes = sharding.piece_sizes(examples(batch), self._model.replica_set.num_replicas)
        chosen = sharding.spared(sizes) if spares else sizes
        if chosen != sizes:
            batch = self.first_rows(batch, sum(chosen))
        return TriedBatch(batch, batch, chosen)

    @abc.abstractmethod
    def first_rows(self, batch: Any, count: int) -> Any:
        """Returns the first examples of a batch."""

    @abc.abstractmethod
    def draw_alike(self) -> None:
        """Sets the framework's random generators to the same state on all workers."""

    @abc.abstractmethod
    def __enter__(self) -> Trial:
        """Saves the state of the random generators."""

    @abc.abstractmethod
    def __exit__(self, *error: object) -> None:
        """Restores all state that the trial has changed."""

    @abc.abstractmethod
    def keep(self, variables: Iterable[Any]) -> None:
        """Saves the values of those variables that are not saved yet."""

    @abc.abstractmethod
    def restore(self) -> None:
        """Restores the saved values of the variables."""

    @abc.abstractmethod
    def ready(self, optimizer: Any, variables: Sequence[Any] | None) -> None:
        """Builds an optimizer as the strategy's first step would."""

    @abc.abstractmethod
    def alone(
        self, step: Callable[[Any], Any], batch: Any, look: Callable[[], Any], change: float
    ) -> tuple[Any, Any]:
        """Takes a step as plain Keras does, on one device with the whole batch.

        First multiplies the trainable variables by random factors, ``1 - change`` to
        ``1 + change``. Returns the results of `step` and, after it, of `look`.
        """

    @abc.abstractmethod
    def divided(
        self, step: Callable[[Any], Any], batch: Any, look: Callable[[], Any]
    ) -> tuple[Any, Any]:
        """Takes a step as the strategy does. All workers must call it.

        Returns the step's logs for all replicas together, and the result of `look`.
        """

    @abc.abstractmethod
    def drawing(self, draw: Draw) -> AbstractContextManager[Any]:
        """Calls `draw` in place of the framework's random functions, in the calling thread."""

    @abc.abstractmethod
    def as_array(self, value: Any) -> Any:
        """Returns a tensor or a gradient as a NumPy array, sparse ones made dense."""
