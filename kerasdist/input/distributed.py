"""Datasets whose batches are divided among the replicas, for custom loops."""

from __future__ import annotations

import abc
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, final
from weakref import WeakKeyDictionary

from kerasdist import keras_seam
from kerasdist.errors import InputError, UnsupportedError
from kerasdist.input.autoshard import own_source, policy_of
from kerasdist.input.dividing import divided, has_rows
from kerasdist.input.options import (
    AutoShardPolicy,
    InputContext,
    InputOptions,
    InputReplicationMode,
)
from kerasdist.input.sharded import WorkerBatches
from kerasdist.input.sources import batches_of, copied, is_lasting, lasting_batches_of
from kerasdist.structures import map_leaves
from kerasdist.values import per_replica

if TYPE_CHECKING:
    from kerasdist.job.job import Job
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
        self.strategy = strategy
        self._options = options

    def __iter__(self) -> Iterator[Any]:
        ahead = self._options.experimental_per_replica_buffer_size
        if not (self._options.experimental_fetch_to_device and self.strategy.runner.places_ahead):
            return self._batches()
        return _read_ahead(self._batches(), ahead)

    def __bool__(self) -> bool:
        return True  # however long it is, and whether that is known

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
        """Yields for each batch one structure a replica of this process."""

    @abc.abstractmethod
    def _batches(self) -> Iterator[Any]:
        """Yields each batch as a value with these components, placed."""


def _read_ahead(batches: Iterator[Any], ahead: int) -> Iterator[Any]:
    waiting: deque[Any] = deque()
    for batch in batches:
        # Placing a batch does not wait for its copy, so it is on its way while others are used.
        waiting.append(batch)
        if len(waiting) > ahead:
            yield waiting.popleft()
    yield from waiting


@final
class DividedDataset(DistributedDataset):
    """Global batches, cut into consecutive pieces, as equal as can be."""

    def __len__(self) -> int:
        """Returns the number of batches of the source."""
        return len(self.source)

    def _pieces(self) -> Iterator[Sequence[Any]]:
        here, replicas = self.strategy.local_replicas, self.strategy.num_replicas_in_sync
        for batch in batches_of(self.source)():
            yield divided(batch, replicas)[here.start : here.stop]

    def _batches(self) -> Iterator[Any]:
        divide, replicas = self.strategy.runner.divide, self.strategy.num_replicas_in_sync
        return (divide(batch, replicas) for batch in lasting_batches_of(self.source)())


@final
class ShardedDataset(DistributedDataset):
    """Batches of which each worker reads its own part, cut into its replicas' pieces."""

    source: WorkerBatches

    def __len__(self) -> int:
        """Returns the number of steps until all workers' data have ended."""
        if self.source.length is None:
            raise TypeError("The number of batches of this dataset is not known.")
        return self.source.length

    def _pieces(self) -> Iterator[Sequence[Any]]:
        replicas = len(self.strategy.local_replicas)
        return (divided(batch, replicas) for batch in self.source.source.everything())

    def _batches(self) -> Iterator[Any]:
        place, replicas = self.strategy.runner.per_replica, len(self.strategy.local_replicas)
        lasting = is_lasting(self.source.source.dataset)
        return (
            place(divided(own.rows if lasting else copied(own.rows), replicas))
            for own in self.source
        )


@final
class GatheredDataset(DistributedDataset):
    """Batches that each replica takes for itself, from a worker's pipeline or one of its own."""

    def rounds(self) -> Iterator[Sequence[Any]]:
        """Yields the replicas' batches round by round, as the pipelines gave them.

        Here only: other workers may have more rounds.
        """
        return self._rounds(job=None)

    def __len__(self) -> int:
        """Returns the number of rounds in which every replica here gets a batch, or some do."""
        if len(self.source) == 1:
            return math.ceil(len(self.source[0]) / len(self.strategy.local_replicas))
        return max(len(pipeline) for pipeline in self.source)

    def _pieces(self) -> Iterator[Sequence[Any]]:
        return self._rounds(job=None)

    def _rounds(self, job: Job | None) -> Iterator[Sequence[Any]]:
        replicas = len(self.strategy.local_replicas)
        iterators = [lasting_batches_of(pipeline)() for pipeline in self.source]
        takers = iterators * replicas if len(iterators) == 1 else iterators
        empty: Any = _NONE
        while True:
            batches = [next(taker, _NONE) for taker in takers]
            there = [batch for batch in batches if batch is not _NONE]
            if not _any_worker(job, has_batch=bool(there)):
                return
            if there:
                # A replica whose data have ended gets a batch without an example.
                empty = map_leaves(_without_rows, there[0])
            elif empty is _NONE:
                raise InputError(
                    "Expected at least one batch on every worker. Received: a dataset without any, "
                    "while other workers have data. Give each worker some."
                )
            yield [empty if batch is _NONE else batch for batch in batches]

    def _batches(self) -> Iterator[Any]:
        return map(self.strategy.runner.per_replica, self._rounds(job_of(self.strategy)))


def job_of(strategy: Strategy) -> Job | None:
    """Returns the job whose workers share a strategy, None if there are no others.

    Args:
        strategy: The strategy.
    """
    return None if strategy.replica_set is None else strategy.replica_set.job


def _any_worker(job: Job | None, *, has_batch: bool) -> bool:
    return has_batch if job is None else any(job.exchange("the next batch of a dataset", has_batch))


def distributed(dataset: Any, strategy: Strategy, options: InputOptions) -> Any:
    """Returns a dataset of global batches, divided among a strategy's replicas.

    Args:
        dataset: What `batches_of` takes.
        strategy: The strategy.
        options: How to distribute it.

    Raises:
        InputError: If it is no dataset.
        UnsupportedError: If the options ask for a pipeline a replica.
    """
    if isinstance(dataset, DistributedDataset):
        return dataset
    if options.experimental_replication_mode is InputReplicationMode.PER_REPLICA:
        raise UnsupportedError(
            "Expected InputReplicationMode.PER_WORKER: one dataset has one pipeline. Received: "
            f"options={options}. Use strategy.distribute_datasets_from_function."
        )
    if strategy.num_replicas_in_sync == 1 and keras_seam.is_native_dataset(dataset):
        return dataset
    batches_of(dataset)  # complains now, not in the loop
    job, policy = job_of(strategy), policy_of(dataset, options.auto_shard_policy)
    if job is not None and not policy.keeps_global_batches:
        return _sharded(dataset, policy, strategy, options, job)
    ours = DividedDataset(dataset, strategy, options)
    return _preferred(strategy.runner.distribute(dataset, options), ours)


def _sharded(
    dataset: Any, policy: AutoShardPolicy, strategy: Strategy, options: InputOptions, job: Job
) -> Any:
    source = own_source(dataset, policy, job)
    ours = ShardedDataset(WorkerBatches(source, job), strategy, options)
    pieces = source.steps_a_batch * len(strategy.local_replicas)
    return _preferred(strategy.runner.distribute_own(source.dataset, pieces, options), ours)


def shards_itself(dataset: Any, job: Job | None) -> bool:
    """Returns whether a dataset's own options say that each worker reads a part of it.

    Args:
        dataset: Anything.
        job: The job of this process.
    """
    if job is None or keras_seam.auto_shard_policy(dataset) is None:
        return False
    return not policy_of(dataset, None).keeps_global_batches


def from_function(
    dataset_fn: Callable[[InputContext], Any], strategy: Strategy, options: InputOptions
) -> Any:
    """Returns a dataset in which each replica takes its own batches.

    The function is called for the pipelines of this process: one, or one for each of its replicas.

    Args:
        dataset_fn: Makes the batches.
        strategy: The strategy.
        options: How to distribute them.
    """
    replicas = strategy.num_replicas_in_sync
    each = options.experimental_replication_mode is InputReplicationMode.PER_REPLICA
    here = strategy.local_replicas
    count = replicas if each else replicas // len(here)
    own = here if each else [here.start // len(here)]
    pipelines = [dataset_fn(InputContext(count, index, replicas)) for index in own]
    if replicas == 1:
        return distributed(pipelines[0], strategy, InputOptions())
    for pipeline in pipelines:
        batches_of(pipeline)  # complains now, not in the loop
    ours = GatheredDataset(pipelines, strategy, options)
    return _preferred(strategy.runner.distribute_pipelines(pipelines, options), ours)


def equivalent(dataset: Any) -> Any:
    """Returns what kerasdist would have made where a framework distributed its own dataset.

    Args:
        dataset: A `DistributedDataset`, or a framework's that passes for one.
    """
    return dataset if _is_ours(dataset) else _EQUIVALENTS.get(dataset)


# What a framework's own distributed dataset stands for.
_EQUIVALENTS: WeakKeyDictionary[Any, DistributedDataset] = WeakKeyDictionary()


def _preferred(own: Any | None, ours: DistributedDataset) -> Any:
    """Returns the framework's own, if there is one, and remembers what it stands for."""
    if own is None:
        return ours
    _EQUIVALENTS[own] = ours
    return own


def _is_ours(dataset: Any) -> bool:
    # Not `isinstance` of the base: a framework's class may be registered there.
    return isinstance(dataset, DividedDataset | ShardedDataset | GatheredDataset)


_NONE = object()


def _without_rows(leaf: Any) -> Any:
    return leaf[:0] if has_rows(leaf) else leaf
