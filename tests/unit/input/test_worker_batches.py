"""Workers that read parts of a dataset, side by side: threads stand for them."""

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import keras
import numpy as np
import pytest

from kerasdist.input.autoshard import KnownSizes, WorkerBatches, own_source
from kerasdist.input.options import AutoShardPolicy
from kerasdist.input.sources import EveryNthBatch

SECONDS = 60
DATA, OFF = AutoShardPolicy.DATA, AutoShardPolicy.OFF


class Meeting:
    """What a `Job` is to datasets, among threads."""

    def __init__(self, rank, workers, barrier, values):
        self.rank, self.num_workers = rank, workers
        self._barrier, self._values = barrier, values

    def all_gather_object(self, label, value):
        self._values[self.rank] = (label, value)
        self._barrier.wait(SECONDS)
        everyone = list(self._values)
        self._barrier.wait(SECONDS)
        assert len({one for one, _ in everyone}) == 1, everyone
        return [theirs for _, theirs in everyone]


def on_workers(workers, work) -> list[Any]:
    """What `work` returns for each worker."""
    barrier, values = threading.Barrier(workers), [None] * workers
    with ThreadPoolExecutor(workers) as pool:
        jobs = (Meeting(rank, workers, barrier, values) for rank in range(workers))
        return list(pool.map(work, jobs, timeout=SECONDS))


def rounds(policy, dataset_of):
    """Reads a dataset to its end."""

    def work(job):
        batches = WorkerBatches(own_source(dataset_of(job.rank), policy, job), job)
        return batches.num_batches, list(batches)

    return work


def arrays(*sizes):
    ends = np.cumsum(sizes)
    return [np.arange(end - size, end) for size, end in zip(sizes, ends, strict=True)]


@pytest.mark.parametrize(("policy", "each"), [(DATA, 4), (OFF, 8)])
def test_the_sizes_of_a_batch_are_exchanged_once(policy, each):
    """Not once a step, where a batch is the rows of several steps."""
    batches, labels = arrays(*[4] * 8), []

    def work(job):
        exchange = job.all_gather_object
        job.all_gather_object = lambda label, one: [labels.append(label), exchange(label, one)][1]
        return len(list(WorkerBatches(own_source(batches, policy, job), job)))

    assert on_workers(2, work) == [8, 8]
    assert labels.count("the next batch of a dataset") == 2 * (each + 1)  # and one for the end


def pipeline(count, size):
    import tensorflow as tf

    rows = np.arange(count * 3, dtype="float32").reshape(count, 3)
    return tf.data.Dataset.from_tensor_slices(rows).batch(size, drop_remainder=True)


def test_a_pipeline_without_end_and_one_that_ends():
    def work(job):
        own = pipeline(4, 2) if job.rank else pipeline(4, 2).repeat()
        batches = WorkerBatches(own_source(own, OFF, job), job)
        return batches.num_batches, list(itertools.islice(batches, 5))

    results = on_workers(2, work)
    assert [length for length, _ in results] == [None] * 2
    assert [step.sizes for step in results[1][1]] == [(2, 2)] * 2 + [(2, 0)] * 3


@pytest.mark.parametrize(
    "change",
    [
        lambda one: one.unbatch().batch(2),  # the last may be smaller
        lambda one: one.filter(lambda _: True),  # how many is not known
        lambda one: one.map(lambda row: {"x": row, "length": row[0, 0]}).take(0),
        lambda one: one.unbatch().batch(1, drop_remainder=True),  # of W steps one has no rows
        lambda one: one.map(lambda row: (row, row[:1])),
    ],
)
def test_other_pipelines_do_not_say_sizes(change):
    def work(job):
        return [
            own_source(one, DATA, job).sizes for one in (change(pipeline(8, 2)), pipeline(8, 2))
        ]

    for unknown, known in on_workers(2, work):
        assert unknown is None
        assert known is not None


def test_rounds_of_several_replicas_have_the_rows_of_their_batches():
    steps = KnownSizes.of(pipeline(10, 2), batches_a_step=3).steps()
    assert list(steps) == [6, 4]
    assert list(itertools.islice(KnownSizes.of(pipeline(4, 2).repeat(), 1, 3).steps(), 2)) == [6, 6]


def test_a_step_for_which_nobody_has_rows_is_none():
    results = on_workers(3, rounds(DATA, lambda _: arrays(2, 2, 2)))
    assert [[step.sizes for step in steps] for _, steps in results] == [[(1, 1, 1), (1, 1, 1)]] * 3


def test_a_worker_without_a_batch_takes_the_form_from_the_others_data():
    _, (_, [step]) = on_workers(2, rounds(DATA, lambda _: [{"x": np.ones((1, 3)), "y": 7}]))
    assert step.sizes == (1, 0)
    assert step.rows["x"].shape == (0, 3)
    assert step.rows["y"] == 7


def test_a_length_that_one_worker_does_not_know_is_not_known():
    results = on_workers(2, rounds(OFF, lambda rank: iter(arrays(2)) if rank else arrays(2, 2)))
    assert [length for length, _ in results] == [None, None]


def test_some_batches_of_a_dataset_keep_its_workers_and_tell_it_of_epochs():
    class Dataset(keras.utils.PyDataset):
        count: int | None = 6
        begun = 0

        @property
        def num_batches(self):
            return self.count

        def __getitem__(self, index):
            return np.full(2, index)

        def on_epoch_begin(self):
            self.begun += 1

    whole = Dataset(workers=3)
    some = EveryNthBatch(whole, 4, 1)
    assert [int(some[index][0]) for index in range(some.num_batches)] == [1, 5]
    some.on_epoch_begin()
    assert (some.workers, whole.begun) == (3, 1)
    whole.count = None
    assert some.num_batches is None
