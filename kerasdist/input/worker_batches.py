"""Datasets of which each worker reads its own part, and tells the others its batches' sizes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import islice, zip_longest
from typing import TYPE_CHECKING, Any, final

from kerasdist import keras_compat
from kerasdist.errors import InputError
from kerasdist.input.autoshard import KnownSizes
from kerasdist.input.sharding import WorkerShard, arrays, examples, rows

if TYPE_CHECKING:
    from kerasdist.input.autoshard import OwnSource
    from kerasdist.job.job import Job

_NONE = object()


@final
class WorkerBatches:
    """Yields a worker's batches, one for each step that all workers take together.

    Workers may have different numbers of batches, and batches of different sizes. So they exchange
    the sizes: once, where the types of all workers' data say them, or else before each step; where
    a batch lasts several steps, once a batch. A worker whose data have ended yields batches without
    rows until all workers' data have ended.
    """

    def __init__(self, source: OwnSource, job: Job) -> None:
        """Takes the batches. All workers must call it."""
        self.source = source
        self._job = job
        known = None if source.sizes is None else asdict(source.sizes)
        everyone = job.all_gather_object("length of a dataset", [source.length, known])
        lengths, known = zip(*everyone, strict=True)
        self._length = None if None in lengths else max(lengths)
        self._known = None if None in known else [KnownSizes(**one) for one in known]

    @property
    def num_workers(self) -> int:
        """How many workers read: what a global batch has depends on it."""
        return self._job.num_workers

    @property
    def length(self) -> int | None:
        """The number of steps until all workers' data have ended, None if that is not known."""
        return self._length

    def __iter__(self) -> Iterator[WorkerShard]:
        """Yields this worker's batches. All workers must call it."""
        return self._exchanged() if self._known is None else self._of_known_sizes(self._known)

    def _of_known_sizes(self, known: Sequence[KnownSizes]) -> Iterator[WorkerShard]:
        own, like, rank = self.source.start(), _NONE, self._job.rank
        alike = all(one.form == known[0].form for one in known)
        for sizes in zip_longest(*(one.steps() for one in known), fillvalue=0):
            batch = next(own) if sizes[rank] else rows(like, 0, 0)
            like = batch if sizes[rank] else like
            yield WorkerShard(
                batch, sizes[rank], sum(sizes), rank, len(sizes), alike, like, given=sizes
            )

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
            if without:  # on all workers
                raise self._without_any(without[0])
            if not batches:
                own, batches = iter(()), [rows(like, 0, 0)] * count
            alike = all(form == forms[0] for form in forms)
            for step, batch in enumerate(batches):
                sizes = tuple([one["rows"][step] if one["rows"] else 0 for one in everyone])
                if total := sum(sizes):
                    rank = self._job.rank
                    yield WorkerShard(
                        batch, sizes[rank], total, rank, len(sizes), alike, like, given=sizes
                    )

    def form(self) -> Any:
        """Returns a batch without rows, for its types and shapes."""
        like = next(self.source.start(), _NONE)
        if like is _NONE:
            like = next(self.source.everything(), _NONE)
        if like is _NONE:
            raise self._without_any(self._job.rank)
        return rows(like, 0, 0)

    def _without_any(self, rank: int) -> InputError:
        """Returns the error where a worker without a batch cannot know the types and shapes."""
        return InputError(
            f"[worker {self._job.rank}/{self._job.num_workers}] Expected at least one batch on "
            f"every worker. Received: a dataset without any on worker {rank}. Give each worker "
            "some."
        )


@final
class ShardedAdapter(keras_compat.DataAdapter):
    """Passes a worker's batches to Keras's loops, for a backend that knows `WorkerShard`."""

    builtin_prefetch = True  # or Keras 3.12 on JAX would copy the batches to a device

    def __init__(self, batches: WorkerBatches) -> None:
        self.batches = batches

    def get_tf_dataset(self) -> WorkerBatches:
        """Returns the batches."""
        return self.batches

    get_jax_iterator = get_torch_dataloader = get_tf_dataset

    @property
    def num_batches(self) -> int | None:
        """The number of steps until all workers' data have ended, None if that is not known."""
        return self.batches.length

    @property
    def batch_size(self) -> None:
        """None: it may differ by step and by worker."""

    @property
    def has_partial_batch(self) -> None:
        """None: it is not known."""

    @property
    def partial_batch_size(self) -> None:
        """None: it is not known."""


def _described(batches: Sequence[Any], like: object) -> dict[str, object]:
    """Returns what the other workers must know of the batches of the next steps, if there are any.

    That is their numbers of rows, and the arrays' types and shapes, which some backends need equal.
    """
    form = None if like is _NONE else [[str(a.dtype), *map(str, a.shape[1:])] for a in arrays(like)]
    return {"rows": list(map(examples, batches)), "form": form}
