"""Selects the batches that a worker reads, if each worker reads a shard of the data.

In a step, workers may have different numbers of rows. So the workers exchange the sizes of their
batches, to know the size of the global batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain, islice, repeat, zip_longest
from typing import TYPE_CHECKING, Any, final

from kerasdist import keras_compat
from kerasdist.errors import InputError, UnsupportedError
from kerasdist.input.options import AutoShardPolicy
from kerasdist.input.sharding import WorkerShard, arrays, examples, piece_sizes, rows, split_batch
from kerasdist.input.sources import (
    EveryNth,
    EveryNthBatch,
    batches_of,
    begin,
    every_nth_of_loader,
    length_of,
    tell_epoch,
)

if TYPE_CHECKING:
    from kerasdist.job.job import Job

_NONE = object()


@final
@dataclass(frozen=True)
class KnownSizes:
    """How many rows a worker has in each step, for a dataset whose batches have one known size.

    Either each batch is divided among several steps, or a step takes several batches. In the second
    case, this class treats the batches of one step as a single larger batch.

    Attributes:
        batch: How many rows of a batch each step gets, for the steps among which the batch is
            divided. No number is 0.
        count: The number of batches; None if the dataset is endless.
        last: A list with the number of rows of a last step that takes fewer batches than the other
            steps; empty if there is no such step.
        form: The types of a batch's arrays, and their shapes without the axis of examples.
    """

    batch: Sequence[int]
    count: int | None
    last: Sequence[int]
    form: Sequence[object]

    @classmethod
    def of(cls, dataset: object, steps: int = 1, batches_a_step: int = 1) -> KnownSizes | None:
        """Returns the sizes of a worker's steps.

        Each batch is divided among `steps` steps, or each step takes `batches_a_step` batches. The
        result is None if the dataset is empty or does not know the size of its batches, or if a
        batch has fewer rows than `steps`.
        """
        found = keras_compat.equal_batches(dataset)
        if found is None or found.count == 0 or found.rows < steps:
            return None
        count, rest = (None, 0) if found.count is None else divmod(found.count, batches_a_step)
        batch = [size * batches_a_step for size in piece_sizes(found.rows, steps)]
        return cls(batch, count, [found.rows * rest] * bool(rest), found.form)

    def steps(self) -> Iterator[int]:
        """Yields the number of rows of each step."""
        batches = repeat(self.batch) if self.count is None else repeat(self.batch, self.count)
        return chain(chain.from_iterable(batches), self.last)


@final
@dataclass(eq=False)
class OwnSource:
    """The shard of a dataset that this worker reads.

    Attributes:
        whole: The dataset of which each worker reads a shard.
        dataset: The batches of the shard, for a backend that does not read them through `start`.
        steps_a_batch: The number of steps among which each batch is divided.
        sizes: How many rows each step has; None if the dataset does not know that.
    """

    whole: Any
    dataset: Any
    steps_a_batch: int = 1
    sizes: KnownSizes | None = None
    _epochs: int = field(default=0, init=False)

    @property
    def length(self) -> int | None:
        """The number of steps for which the shard has rows; None if it is not known."""
        batches = length_of(self.dataset)
        return None if batches is None else batches * self.steps_a_batch

    def start(self) -> Iterator[Any]:
        """Iterates over the worker's rows, step by step; each iteration is a new epoch."""
        epoch, self._epochs = self._epochs, self._epochs + 1
        if keras_compat.is_torch_dataloader(self.whole):
            tell_epoch(self.whole, epoch)
        for batch in begin(self.dataset):
            steps = self.steps_a_batch
            yield from [batch] if steps == 1 else split_batch(batch, steps)

    def everything(self) -> Iterator[Any]:
        """Iterates over the whole dataset, to find the types and shapes of a batch.

        This iteration is used if this worker's shard has no batch.
        """
        return batches_of(self.whole)()

    def pass_epochs(self, epochs: int) -> None:
        """Skips epochs that an earlier process has already read."""
        self._epochs += epochs
        if keras_compat.is_tf_dataset(self.dataset):
            keras_compat.begin_often(self.dataset, epochs)


def policy_of(dataset: object, said: AutoShardPolicy | None) -> AutoShardPolicy:
    """Returns the policy for sharding a dataset: the user's, else the dataset's own, else AUTO."""
    if said is not None:
        return said
    own = keras_compat.auto_shard_policy(dataset)
    if own is None:
        return AutoShardPolicy.AUTO
    if own not in AutoShardPolicy.__members__:
        raise UnsupportedError(
            f"Expected a policy among {', '.join(AutoShardPolicy.__members__)}. Received: "
            f"auto_shard_policy={own} in the dataset's tf.data.Options. Shard the dataset "
            "by hand, and use OFF."
        )
    return AutoShardPolicy[own]


def own_source(dataset: object, policy: AutoShardPolicy, job: Job) -> OwnSource:
    """Returns a dataset's shard that this worker reads. All workers must call this function."""
    own, steps = dataset, 1
    if policy is not AutoShardPolicy.OFF:
        shard = _by_file if policy is AutoShardPolicy.FILE else _by_batch
        own, steps = shard(dataset, job), job.num_workers
    return OwnSource(dataset, own, steps, KnownSizes.of(own, steps))


def _by_batch(dataset: Any, job: Job) -> Any:
    step, first = job.num_workers, job.rank
    if keras_compat.is_tf_dataset(dataset):
        return dataset.shard(step, first)
    if isinstance(dataset, keras_compat.PyDataset):
        return EveryNthBatch(dataset, step, first)
    if keras_compat.is_torch_dataloader(dataset):
        own = every_nth_of_loader(dataset, step, first)
        if own is not None:
            return own
    return EveryNth(dataset, step, first)


def _by_file(dataset: object, job: Job) -> Any:
    if keras_compat.is_tf_dataset(dataset):
        own, why = keras_compat.every_nth_file(dataset, job.num_workers, job.rank)
    else:
        own, why = None, "it is no tf.data pipeline"
    # A worker that finds files does not know whether the other workers have found files. So all
    # workers exchange their errors, and raise an error if any of them has one.
    reasons = [one for one in job.all_gather_object("files of a dataset", why) if one is not None]
    if reasons:
        raise InputError(
            f"{job.who} Expected a tf.data pipeline that reads at least {job.num_workers} files, "
            "one a worker, for AutoShardPolicy.FILE. Received: dataset of type "
            f"{type(dataset).__name__}: {reasons[0]}. Write more files, or use "
            "AutoShardPolicy.AUTO or DATA."
        )
    return own


@final
class WorkerBatches(keras_compat.DataAdapter):
    """The batches of a worker, one for each step that all workers take together.

    The object is a data adapter for Keras's loops, on backends that support `WorkerShard`.

    Workers may have different numbers of batches, and batches of different sizes, so they exchange
    the sizes of their batches. If each worker's dataset knows its sizes, the workers exchange them
    once, at the beginning. Otherwise they exchange the size of each batch before its first step. A
    worker whose data have ended yields batches without rows until all workers' data have ended.
    """

    # kerasdist itself places batches on devices. Without this attribute, Keras 3.12 on JAX would
    # first copy each batch to a device.
    builtin_prefetch = True
    # Keras gets no batch size, because sizes may differ between steps and workers.
    batch_size = has_partial_batch = partial_batch_size = None

    def __init__(self, source: OwnSource, job: Job) -> None:
        """Exchanges the lengths of the workers' shards. All workers must call this method."""
        self.source = source
        self._job = job
        known = None if source.sizes is None else asdict(source.sizes)
        everyone = job.all_gather_object("length of a dataset", [source.length, known])
        lengths, known = zip(*everyone, strict=True)
        self._length = None if None in lengths else max(lengths)
        self._known = None if None in known else [KnownSizes(**one) for one in known]

    @property
    def num_workers(self) -> int:
        """How many workers read the data; the size of a global batch depends on this number."""
        return self._job.num_workers

    def get_tf_dataset(self) -> WorkerBatches:
        """Returns this object, which yields the batches."""
        return self

    get_torch_dataloader = get_tf_dataset

    def get_jax_iterator(self, super_batch: int | None = None) -> WorkerBatches:
        """Returns this object, which yields the batches one by one."""
        return self

    @property
    def num_batches(self) -> int | None:
        """The number of steps until all workers' data have ended; None if it is not known."""
        return self._length

    def __iter__(self) -> Iterator[WorkerShard]:
        """Yields this worker's batches. All workers must call this method."""
        return self._exchanged() if self._known is None else self._of_known_sizes(self._known)

    def _of_known_sizes(self, known: Sequence[KnownSizes]) -> Iterator[WorkerShard]:
        own, like, rank = self.source.start(), _NONE, self._job.rank
        alike = all(one.form == known[0].form for one in known)
        for sizes in zip_longest(*(one.steps() for one in known), fillvalue=0):
            batch = next(own) if sizes[rank] else rows(like, 0, 0)
            like = batch if sizes[rank] else like
            yield WorkerShard.of_sizes(batch, sizes, rank, alike=alike, like=like)

    def _exchanged(self) -> Iterator[WorkerShard]:
        own, like, count = self.source.start(), _NONE, self.source.steps_a_batch
        while True:
            batches = list(islice(own, count))
            if batches:
                like = next(filter(examples, batches), batches[0] if like is _NONE else like)
            elif like is _NONE:
                like = next(self.source.everything(), _NONE)
            everyone = self._job.all_gather_object(
                "the next batch of a dataset", _described(batches, like)
            )
            forms = [one["form"] for one in everyone if one["rows"]]
            if not forms:
                return
            without = [rank for rank, one in enumerate(everyone) if one["form"] is None]
            if without:  # this list is equal on all workers, so all raise the error
                raise no_batch(self._job, without[0])
            if not batches:
                own, batches = iter(()), [rows(like, 0, 0)] * count
            alike = all(form == forms[0] for form in forms)
            for step, batch in enumerate(batches):
                sizes = tuple([one["rows"][step] if one["rows"] else 0 for one in everyone])
                if any(sizes):
                    rank = self._job.rank
                    yield WorkerShard.of_sizes(batch, sizes, rank, alike=alike, like=like)

    def form(self) -> Any:
        """Returns a batch without rows, which shows the types and shapes of a batch's arrays."""
        like = next(self.source.start(), _NONE)
        if like is _NONE:
            like = next(self.source.everything(), _NONE)
        if like is _NONE:
            raise no_batch(self._job, self._job.rank)
        return rows(like, 0, 0)


def no_batch(job: Job, rank: int) -> InputError:
    """Returns the error for a worker that has no batch, and so no types and shapes of arrays."""
    return InputError(
        f"{job.who} Expected at least one batch on every worker. Received: a dataset without a "
        f"batch on worker {rank}. Give each worker at least one batch."
    )


def _described(batches: Sequence[Any], like: object) -> dict[str, object]:
    """Returns what the other workers must know of this worker's batches for the next steps.

    The result has the batches' numbers of rows. It also has the types and shapes of the arrays in a
    row, which must be equal on all workers for some backends.
    """
    form = None if like is _NONE else [[str(a.dtype), *map(str, a.shape[1:])] for a in arrays(like)]
    return {"rows": list(map(examples, batches)), "form": form}
