"""Datasets whose batches are divided among the replicas, for custom loops."""

from __future__ import annotations

import abc
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, final
from weakref import WeakKeyDictionary

from kerasdist import keras_compat
from kerasdist.api.values import per_replica
from kerasdist.core.earlier_names import EarlierNames
from kerasdist.core.structures import map_leaves
from kerasdist.errors import UnsupportedError
from kerasdist.input.autoshard import KnownSizes, WorkerBatches, no_batch, own_source, policy_of
from kerasdist.input.options import InputContext, InputOptions, InputReplicationMode
from kerasdist.input.sharding import rows, split_batch
from kerasdist.input.sources import batches_of, copied, is_lasting, lasting_batches_of

if TYPE_CHECKING:
    from kerasdist.core.context import StrategyLike
    from kerasdist.job.job import Job


class DistributedDataset(EarlierNames, abc.ABC):
    """A dataset whose batches are distributed values, with a component on every replica.

    The dataset can be iterated repeatedly. Its iterators have `get_next` and `element_spec`, like
    ``tf.distribute.DistributedIterator``.

    Example::

        dataset = strategy.distribute_dataset([(x[:16], y[:16]), (x[16:32], y[16:32])])
        for batch in dataset:
            sums = strategy.run(lambda batch: keras.ops.sum(batch[0]), args=(batch,))

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/DistributedDataset
    """

    def __init__(self, source: Any, strategy: StrategyLike, options: InputOptions) -> None:
        self.source = source
        self.strategy = strategy
        self.options = options

    def __iter__(self) -> DistributedIterator:
        ahead = self.options.experimental_per_replica_buffer_size
        if not (self.options.experimental_fetch_to_device and self.strategy.runner.places_ahead):
            return DistributedIterator(self, self._batches())
        return DistributedIterator(self, read_ahead(self._batches(), ahead))

    def __bool__(self) -> bool:
        return True  # even if the dataset is empty, or its length is unknown

    @property
    def element_spec(self) -> Any:
        """The types and shapes of a batch: a `PerReplica` of `keras.KerasTensor` for each array.

        The types and shapes are taken from the first batch. The size along axis 0 is None, because
        other batches may be smaller.
        """
        local_batches = next(iter(self._local_batches()))
        return per_replica(
            [map_leaves(keras_compat.spec_of_rows, local_batch) for local_batch in local_batches]
        )

    @abc.abstractmethod
    def __len__(self) -> int:
        """Returns the number of batches.

        Raises:
            TypeError: If the source does not know the number of batches.
        """

    @abc.abstractmethod
    def _local_batches(self, job: Job | None = None) -> Iterator[Sequence[Any]]:
        """Yields, for each batch, the local batches of the replicas of this process.

        With a job, all workers must read these batches, which continue until the data of all
        workers have ended. Without a job, this worker reads alone, until its own data have ended.
        """

    def _batches(self) -> Iterator[Any]:
        """Yields each batch as a distributed value, placed on the devices."""
        local_batches = self._local_batches(job_of(self.strategy))
        return map(self.strategy.runner.per_replica, local_batches)


@final
class DistributedIterator(EarlierNames, Iterator[Any], metaclass=abc.ABCMeta):
    """The batches of a `DistributedDataset`, one after another."""

    def __init__(self, dataset: DistributedDataset, batches: Iterator[Any]) -> None:
        self._dataset = dataset
        self._batches = batches

    def __next__(self) -> Any:
        replica_set = self._dataset.strategy.replica_set
        if replica_set is not None and replica_set.is_tracing():
            raise UnsupportedError(
                "Expected batches to be taken outside of a kerasdist.function and of strategy.run, "
                "which are traced once, so that all calls would see one batch. Received: a batch "
                "taken inside. Give the function the batch as an argument: step(next(iterator))."
            )
        return next(self._batches)

    def get_next(self) -> Any:
        """Returns the next batch.

        Raises:
            StopIteration: If there is no further batch.
        """
        return next(self)

    @property
    def element_spec(self) -> Any:
        """The types and shapes of a batch (see `DistributedDataset.element_spec`)."""
        return self._dataset.element_spec


@final
class InputIterator(Iterator[Any]):
    """The batches of a distributed dataset, one after another, as in TensorFlow 1."""

    def __init__(self, dataset: Any) -> None:
        """Stores a dataset that `Strategy.distribute_dataset` has returned."""
        self._dataset = dataset
        self.initialize()

    def initialize(self) -> None:
        """Starts a new iteration."""
        self._batches = iter(self._dataset)

    def __next__(self) -> Any:
        return next(self._batches)

    def get_next(self) -> Any:
        """Returns the next batch.

        Raises:
            StopIteration: If there is no further batch.
        """
        return next(self)


def read_ahead(batches: Iterator[Any], ahead: int) -> Iterator[Any]:
    """Yields batches, and takes up to `ahead` further batches before they are needed."""
    waiting: deque[Any] = deque()
    for batch in batches:
        # Taking a batch starts its copy to the devices, which runs while earlier batches are used.
        waiting.append(batch)
        if len(waiting) > ahead:
            yield waiting.popleft()
    yield from waiting


@final
class DividedDataset(DistributedDataset):
    """Global batches, cut into consecutive local batches of sizes as equal as possible."""

    def __len__(self) -> int:
        return len(self.source)

    def _local_batches(self, job: Job | None = None) -> Iterator[Sequence[Any]]:
        here, replicas = self.strategy.local_replicas, self.strategy.num_replicas_in_sync
        for batch in batches_of(self.source)():
            yield split_batch(batch, replicas)[here.start : here.stop]

    def _batches(self) -> Iterator[Any]:
        divide = partial(self.strategy.runner.divide, self.strategy)
        return map(divide, lasting_batches_of(self.source)())


@final
class ShardedDataset(DistributedDataset):
    """A dataset of which each worker reads a shard.

    A worker divides the batches of its shard among its own replicas.
    """

    source: WorkerBatches

    def __len__(self) -> int:
        """Returns the number of steps until all workers' data have ended."""
        if self.source.num_batches is None:
            raise TypeError("The number of batches of this dataset is not known.")
        return self.source.num_batches

    def _local_batches(self, job: Job | None = None) -> Iterator[Sequence[Any]]:
        # Without a job, as for `element_spec`, these are the batches of the whole dataset.
        own, replicas = self.source.source, len(self.strategy.local_replicas)
        lasting = is_lasting(own.dataset)
        batches = own.everything() if job is None else (one.rows for one in self.source)
        return (split_batch(one if lasting else copied(one), replicas) for one in batches)


@final
class GatheredDataset(DistributedDataset):
    """A dataset in which each replica takes whole batches: no batch is divided among replicas.

    A replica takes its batches from a pipeline of its own, or from the one pipeline of its worker.
    In a round, each replica of this process takes its next batch.
    """

    def __len__(self) -> int:
        """Returns the number of rounds in which any replica of this process gets a batch."""
        if len(self.source) == 1:
            return math.ceil(len(self.source[0]) / len(self.strategy.local_replicas))
        return max(len(pipeline) for pipeline in self.source)

    def sizes_of_rounds(self) -> KnownSizes | None:
        """Returns how many rows this process has in each round; None if that is not known."""
        if len(self.source) > 1:
            return None
        return KnownSizes.of(self.source[0], batches_a_step=len(self.strategy.local_replicas))

    def rounds(self, job: Job | None = None) -> Iterator[Sequence[Any]]:
        """Yields, for each round, a list with the next batch of each replica of this process."""
        replicas = len(self.strategy.local_replicas)
        iterators = [lasting_batches_of(pipeline)() for pipeline in self.source]
        takers = iterators * replicas if len(iterators) == 1 else iterators
        empty: Any = _NONE
        while True:
            batches = [next(taker, _NONE) for taker in takers]
            there = [batch for batch in batches if batch is not _NONE]
            goes_on = bool(there)
            if job is not None:
                goes_on = any(job.all_gather_object("the next batch of a dataset", goes_on))
            if not goes_on:
                return
            if there:
                # A replica whose data have ended gets an empty batch.
                empty = rows(there[0], 0, 0)
            elif empty is _NONE:
                assert job is not None  # other workers have batches
                raise no_batch(job, job.rank)
            yield [empty if batch is _NONE else batch for batch in batches]

    _local_batches = rounds


def job_of(strategy: StrategyLike) -> Job | None:
    """Returns the job whose workers share a strategy; None if this process is the only worker."""
    return None if strategy.replica_set is None else strategy.replica_set.job


def distributed(dataset: object, strategy: StrategyLike, options: InputOptions) -> Any:
    """Returns a dataset whose batches are divided among a strategy's replicas."""
    if isinstance(dataset, DistributedDataset):
        return dataset
    if options.experimental_replication_mode is InputReplicationMode.PER_REPLICA:
        raise UnsupportedError(
            "Expected InputReplicationMode.PER_WORKER: one dataset has one pipeline. Received: "
            f"options={options}. Use strategy.distribute_datasets_from_function."
        )
    if strategy.num_replicas_in_sync == 1 and keras_compat.is_native_dataset(dataset):
        return dataset
    batches_of(dataset)  # an object that is no dataset raises an error now, before the loop
    job, policy = job_of(strategy), policy_of(dataset, options.auto_shard_policy)
    if job is not None and not policy.keeps_global_batches:
        _require_own_rows(strategy)
        own = WorkerBatches(own_source(dataset, policy, job), job)
        return _preferred(ShardedDataset(own, strategy, options))
    return _preferred(DividedDataset(dataset, strategy, options))


def _require_own_rows(strategy: StrategyLike) -> None:
    """Raises an error if a replica spans several workers, which must all read the same rows."""
    replicas: Any = strategy.replica_set
    if replicas is not None and replicas.spans_workers:
        raise UnsupportedError(
            "Expected a dataset of global batches, which all workers read: with this LayoutMap "
            f"{replicas.options.devices_per_replica} workers compute the rows of one replica. "
            "Received: a dataset of which each worker reads its own rows. Pass the global batches "
            "to fit or strategy.distribute_dataset, with AutoShardPolicy.OFF for a tf.data "
            "pipeline with options."
        )


def shards_itself(dataset: object) -> bool:
    """Returns whether a dataset's own options make each worker of a job read only a shard."""
    return not policy_of(dataset, None).keeps_global_batches


def from_function(
    dataset_fn: Callable[[InputContext], Any], strategy: StrategyLike, options: InputOptions
) -> Any:
    """Returns a dataset in which each replica takes its own batches.

    `options` decides whether `dataset_fn` is called once for this process, or once for each replica
    of this process.
    """
    _require_own_rows(strategy)
    replicas = strategy.num_replicas_in_sync
    each = options.experimental_replication_mode is InputReplicationMode.PER_REPLICA
    here = strategy.local_replicas
    count = replicas if each else replicas // len(here)
    own = here if each else [here.start // len(here)]
    keras_compat.leave_accelerators()  # because `dataset_fn` may start TensorFlow
    pipelines = [dataset_fn(InputContext(count, index, replicas)) for index in own]
    if replicas == 1:
        return distributed(pipelines[0], strategy, InputOptions())
    for pipeline in pipelines:
        batches_of(pipeline)  # an object that is no dataset raises an error now, before the loop
    return _preferred(GatheredDataset(pipelines, strategy, options))


def equivalent(dataset: object) -> Any:
    """Returns kerasdist's own dataset for a distributed dataset; None for any other object.

    On TensorFlow, users may get a dataset of ``tf.distribute``. For such a dataset, the result is
    the `DistributedDataset` from which it was made.
    """
    return dataset if _is_ours(dataset) else _EQUIVALENTS.get(dataset)


# For each distributed dataset of a framework, kerasdist's dataset with the same batches.
_EQUIVALENTS: WeakKeyDictionary[Any, DistributedDataset] = WeakKeyDictionary()


def _preferred(ours: DistributedDataset) -> Any:
    """Returns the framework's equivalent of a dataset if there is one, else the dataset itself."""
    own = ours.strategy.runner.native_dataset(ours)
    if own is None:
        if ours.options.experimental_place_dataset_on_device:
            raise UnsupportedError(
                "Expected a tf.data.Dataset on TensorFlow: only such a dataset can be placed on a "
                "device. Received: experimental_place_dataset_on_device=True. Leave the option "
                "out: batches go to their replica's device in any case."
            )
        return ours
    _EQUIVALENTS[own] = ours
    return own


def _is_ours(dataset: object) -> bool:
    # The subclasses are listed, because ``tf.distribute.DistributedDataset`` is registered with the
    # base class, so that TensorFlow's datasets are also instances of the base class.
    return isinstance(dataset, DividedDataset | ShardedDataset | GatheredDataset)


_NONE = object()
