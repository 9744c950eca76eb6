"""Datasets whose batches are divided among the replicas, for custom loops."""

from __future__ import annotations

import abc
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, final

from kerasdist import keras_seam
from kerasdist.errors import InputError
from kerasdist.input.options import InputContext, InputOptions, InputReplicationMode
from kerasdist.input.sharding import piece_bounds
from kerasdist.input.sources import batches_of
from kerasdist.structures import flatten, map_leaves
from kerasdist.values import per_replica

if TYPE_CHECKING:
    from kerasdist.strategy import Strategy


class DistributedDataset(abc.ABC):
    """Batches with a component on every replica; it can be iterated again and again.

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/DistributedDataset
    """

    def __init__(self, source: Any, strategy: Strategy, options: InputOptions) -> None:
        """Makes the dataset.

        Args:
            source: What the batches come from.
            strategy: Whose replicas they are for.
            options: How to distribute them.
        """
        self.source = source
        self._strategy = strategy
        self._options = options

    def __iter__(self) -> Iterator[Any]:
        ahead = self._options.experimental_per_replica_buffer_size
        if not self._options.experimental_fetch_to_device:
            ahead = 0
        waiting: deque[Any] = deque()
        for pieces in self._pieces():
            # Placing a batch does not wait for its copy, so it is on its way while others are used.
            waiting.append(self._strategy.runner.per_replica(pieces))
            if len(waiting) > ahead:
                yield waiting.popleft()
        yield from waiting

    @property
    def element_spec(self) -> Any:
        """The types and shapes of a batch: a `PerReplica` of `keras.KerasTensor` for each array.

        The size along the axis of the examples is None, since a batch may be smaller than the
        first, which is looked at.
        """
        pieces = next(iter(self._pieces()))
        return per_replica([map_leaves(keras_seam.spec_of_rows, piece) for piece in pieces])

    @abc.abstractmethod
    def __len__(self) -> int:
        """Returns the number of batches.

        Raises:
            TypeError: If the source does not know it.
        """

    @abc.abstractmethod
    def _pieces(self) -> Iterator[Sequence[Any]]:
        """Yields for each batch one structure a replica."""


@final
class DividedDataset(DistributedDataset):
    """Global batches, cut into consecutive pieces, as equal as can be."""

    def __len__(self) -> int:
        """Returns the number of batches of the source."""
        return len(self.source)

    def _pieces(self) -> Iterator[Sequence[Any]]:
        replicas = self._strategy.num_replicas_in_sync
        for batch in batches_of(self.source)():
            yield divided(batch, replicas)


@final
class GatheredDataset(DistributedDataset):
    """Batches that each replica takes for itself, from one pipeline or one each."""

    def __len__(self) -> int:
        """Returns the number of rounds in which every replica gets a batch, or some do."""
        if len(self.source) == 1:
            return math.ceil(len(self.source[0]) / self._strategy.num_replicas_in_sync)
        return max(len(pipeline) for pipeline in self.source)

    def _pieces(self) -> Iterator[Sequence[Any]]:
        replicas = self._strategy.num_replicas_in_sync
        iterators = [batches_of(pipeline)() for pipeline in self.source]
        takers = iterators * replicas if len(iterators) == 1 else iterators
        while True:
            batches = [next(taker, _NONE) for taker in takers]
            there = [batch for batch in batches if batch is not _NONE]
            if not there:
                return
            # A replica whose data have ended gets a batch without an example.
            empty = map_leaves(_without_rows, there[0])
            yield [empty if batch is _NONE else batch for batch in batches]


def distributed(dataset: Any, strategy: Strategy, options: InputOptions) -> Any:
    """Returns a dataset of global batches, divided among a strategy's replicas.

    Args:
        dataset: What `batches_of` takes.
        strategy: The strategy.
        options: How to distribute it.
    """
    if strategy.num_replicas_in_sync == 1 or isinstance(dataset, DistributedDataset):
        return dataset
    own = strategy.runner.distribute(dataset, options)
    if own is not None:
        return own
    batches_of(dataset)  # complains now, not in the loop
    return DividedDataset(dataset, strategy, options)


def from_function(
    dataset_fn: Callable[[InputContext], Any], strategy: Strategy, options: InputOptions
) -> Any:
    """Returns a dataset in which each replica takes its own batches.

    Args:
        dataset_fn: Makes the batches.
        strategy: The strategy.
        options: How to distribute them.
    """
    replicas = strategy.num_replicas_in_sync
    each = options.experimental_replication_mode is InputReplicationMode.PER_REPLICA
    count = replicas if each else 1
    pipelines = [dataset_fn(InputContext(count, index, replicas)) for index in range(count)]
    if replicas == 1:
        return pipelines[0]
    own = strategy.runner.distribute_pipelines(pipelines, options)
    return GatheredDataset(pipelines, strategy, options) if own is None else own


def divided(batch: Any, replicas: int) -> list[Any]:
    """Cuts a batch into one structure a replica; None and scalars go to all.

    Args:
        batch: Arrays with the examples along axis 0, in any structure.
        replicas: How many replicas there are.

    Raises:
        InputError: If the arrays differ in their number of examples.
    """
    arrays = [leaf for leaf in flatten(batch) if _has_rows(leaf)]
    sizes = {leaf.shape[0] for leaf in arrays}
    if len(sizes) > 1:
        raise InputError(
            "Expected all arrays of a batch to have as many rows, one an example. "
            f"Received: shapes={[tuple(leaf.shape) for leaf in arrays]}."
        )
    bounds = piece_bounds(next(iter(sizes), 0), replicas)
    return [
        map_leaves(lambda leaf: leaf[begin:end] if _has_rows(leaf) else leaf, batch)  # noqa: B023
        for begin, end in bounds
    ]


_NONE = object()


def _without_rows(leaf: Any) -> Any:
    return leaf[:0] if _has_rows(leaf) else leaf


def _has_rows(leaf: Any) -> bool:
    """Whether a leaf is an array with an axis of examples."""
    return len(getattr(leaf, "shape", ())) > 0
