"""Taking a training step to see what it computes, and putting everything back."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import keras

from kerasdist.input import sharding
from kerasdist.input.dividing import has_rows

# Called where code draws random numbers: gets the name of the function, a function that draws, and
# what is returned as it is where the draw would only change the order or the size of a tensor.
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
    """Returns how many examples a global batch has, 0 if no array says it.

    Args:
        batch: Tensors or NumPy arrays in any structure.
    """
    sizes = [leaf.shape[0] for leaf in keras.tree.flatten(batch) if has_rows(leaf)]
    return int(sizes[0] or 0) if sizes else 0


class Trial(abc.ABC):
    """One model's training step on one batch, alone and divided over the replicas.

    Used as a context manager: what steps write inside is put back by `restore`, and at the end.
    """

    # Whether what a step computes can be seen while it does, and its draws replaced.
    sees_inside = True

    def __init__(self, model: Any) -> None:
        """Prepares a trial.

        Args:
            model: A model with a trainer of ours, built.
        """
        self._model = model

    def take(self, batch: Any) -> Any:
        """Takes the model's own training step.

        Args:
            batch: What the step gets.
        """
        return self._model.train_step(batch)

    def gathered(self, batch: Any, *, spares: bool) -> TriedBatch:
        """Returns a batch with the examples of all replicas, in their order.

        All workers must call it.

        Args:
            batch: What the trainer's step takes.
            spares: Whether to leave examples out where there are many (see `sharding.spared`).
        """
        sizes = sharding.piece_sizes(examples(batch), self._model.replica_set.num_replicas)
        chosen = sharding.spared(sizes) if spares else sizes
        if chosen != sizes:
            batch = self.first_rows(batch, sum(chosen))
        return TriedBatch(batch, batch, chosen)

    @abc.abstractmethod
    def first_rows(self, batch: Any, count: int) -> Any:
        """Returns the first examples of a batch.

        Args:
            batch: Tensors with the examples along axis 0, in any structure.
            count: How many.
        """

    @abc.abstractmethod
    def draw_alike(self) -> None:
        """Lets the framework's random generators go on from the same state on all workers."""

    @abc.abstractmethod
    def __enter__(self) -> Trial:
        """Begins: remembers the state of the random generators."""

    @abc.abstractmethod
    def __exit__(self, *error: object) -> None:
        """Puts everything back."""

    @abc.abstractmethod
    def keep(self, variables: Iterable[Any]) -> None:
        """Remembers the values of variables, those that it does not know yet.

        Args:
            variables: Keras variables.
        """

    @abc.abstractmethod
    def restore(self) -> None:
        """Gives the variables the values that they had."""

    @abc.abstractmethod
    def ready(self, optimizer: Any, variables: Sequence[Any] | None) -> None:
        """Sees to it that an optimizer can be used: builds it as the strategy's first step would.

        Args:
            optimizer: A Keras optimizer.
            variables: What it is to update; None: all that it knows.
        """

    @abc.abstractmethod
    def alone(
        self, step: Callable[[Any], Any], batch: Any, look: Callable[[], Any], change: float
    ) -> tuple[Any, Any]:
        """Takes a step as plain Keras does, on one device with the whole batch.

        Args:
            step: Takes the batch.
            batch: The global batch.
            look: Called after the step, while its results can be read.
            change: By what part of itself each trainable value is changed before, at most.

        Returns:
            What `step` and `look` returned.
        """

    @abc.abstractmethod
    def divided(
        self, step: Callable[[Any], Any], batch: Any, look: Callable[[], Any]
    ) -> tuple[Any, Any]:
        """Takes a step as the strategy does. All workers must call it.

        Args:
            step: Takes a replica's piece of the batch.
            batch: The global batch.
            look: Called after the step.

        Returns:
            The logs of the step, of all replicas together, and what `look` returned.
        """

    @abc.abstractmethod
    def drawing(self, draw: Draw) -> AbstractContextManager[Any]:
        """Has a function called in place of the framework's own draws, in the calling thread.

        Args:
            draw: See `Draw`.
        """

    @abc.abstractmethod
    def as_array(self, value: Any) -> Any:
        """Returns a tensor or a gradient as a NumPy array, sparse ones made dense.

        Args:
            value: A tensor, a gradient, or a distributed value with equal components.
        """
