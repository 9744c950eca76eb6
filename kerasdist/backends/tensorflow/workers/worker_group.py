"""Replicas on many workers: all-reduce is the only collective by which they exchange tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, final

import keras
import tensorflow as tf

from kerasdist import keras_compat
from kerasdist.api.options import CommunicationOptions
from kerasdist.backends.tensorflow.fit.batches import (
    OwnRows,
    compared_in,
)
from kerasdist.backends.tensorflow.private.prefetching import in_local_batches, untuned
from kerasdist.backends.tensorflow.private.strategies import WorkersStrategy
from kerasdist.backends.tensorflow.replica.all_reduce import AllReduce
from kerasdist.backends.tensorflow.replica.values import among_zeros, check_alike
from kerasdist.backends.tensorflow.workers.datasets import dataset_of_shards, rows_of_replicas
from kerasdist.backends.tensorflow.workers.group import Group, Parts, read_alike
from kerasdist.input.autoshard import WorkerBatches

if TYPE_CHECKING:
    from kerasdist.job.job import Job


@final
class WorkerGroup(Group):
    """The replicas of all workers, equally many on each."""

    native_strategy: WorkersStrategy
    is_of_workers = True

    def __init__(
        self,
        native_strategy: WorkersStrategy,
        job: Job,
        communication: CommunicationOptions,
        *,
        shares_memory: bool,
    ) -> None:
        own = native_strategy.extended.worker_devices
        timeout = communication.timeout_seconds or 0.0

        def seconds_to_wait() -> float:
            """Returns a collective's time-out: 0 (none) in calls for which the job has its own.

            For each collective with a time-out, TensorFlow starts two threads that sleep until
            the time-out is over, even if the collective is done. 50 steps a second with 10 minutes
            each make 60,000 threads, which kill the process (seen with 2.21,
            base_collective_executor.cc).
            """
            return 0.0 if job.is_watched else timeout

        all_reduce = AllReduce(
            own[:1] if shares_memory else own,
            workers=native_strategy.num_workers,
            key=native_strategy.group_key,
            seconds_to_wait=seconds_to_wait,
            collectives=job.collectives,
        )
        super().__init__(
            native_strategy,
            all_reduce,
            shares_memory=shares_memory,
            communication=replace(communication, timeout_seconds=None),
        )
        self.local = range(job.rank * len(own), (job.rank + 1) * len(own))

    def batches(self, adapter: Any, *, is_followed: bool) -> tf.distribute.DistributedDataset:
        """Returns a dataset of this worker's rows; no other rows are read from arrays."""
        if isinstance(adapter, WorkerBatches):
            return dataset_of_shards(adapter)
        if not keras_compat.is_array_adapter(adapter):

            def rows_and_compared(number: tf.Tensor, batch: Any) -> OwnRows:
                return self.own_rows(batch)._replace(compared=compared_in(number, batch))

            return self._iterated(read_alike(adapter.get_tf_dataset(), rows_and_compared))
        own = keras_compat.tensorflow_rows(
            adapter,
            lambda numbers: self.own_rows(numbers).rows,
            lambda rows, numbers: self.own_rows(numbers)._replace(rows=rows),
        )
        return self._iterated(untuned(own.prefetch(tf.data.AUTOTUNE)))

    def distributed(
        self, dataset: tf.data.Dataset, options: tf.distribute.InputOptions
    ) -> tf.distribute.DistributedDataset:
        """Returns a dataset of this worker's local batches, divided as by `fit`.

        ``tf.distribute`` would shard the files or examples over the workers before it batches
        them, which makes other batches than on one device.
        """
        local_rows = in_local_batches(
            dataset, lambda batch: rows_of_replicas(batch, self._replicas, self.local)
        )
        return self.native_strategy.distribute_datasets_from_function(lambda _: local_rows, options)

    def concatenation(
        self, parts: Parts, axis: int, *, equal_sizes: bool = False
    ) -> tuple[Any, list[Any]]:
        """Concatenates by all-reduce: each tensor is padded with zeros to the total size."""
        first = parts[0]
        if isinstance(first, tf.RaggedTensor):
            return self._ragged(parts), []
        if isinstance(first, tf.SparseTensor):
            return self._sparse(parts), []
        check_alike(parts, axis)
        own = [tf.shape(part)[axis] for part in parts]
        if not equal_sizes:
            sizes = self.from_all_replicas(own)
        else:
            sizes = [own[0] if first.shape[axis] is None else first.shape[axis]] * self._replicas
        begins = [tf.add_n(sizes[:replica]) if replica else 0 for replica in self.local]
        total = tf.add_n(sizes)
        is_bool = first.dtype == tf.bool
        placed = [
            among_zeros(tf.cast(part, tf.int32) if is_bool else part, axis, begin, total)
            for part, begin in zip(parts, begins, strict=True)
        ]
        [whole] = self.sums([placed])
        return tf.cast(whole, tf.bool) if is_bool else whole, sizes

    def from_all_replicas(self, structures: Sequence[Any]) -> list[Any]:
        """Gathers one structure per replica from all workers, by one collective per type."""
        columns = list(zip(*(keras.tree.flatten(one) for one in structures), strict=True))
        there = [index for index, parts in enumerate(columns) if parts[0] is not None]
        rows: list[Sequence[Any]] = [[None] * self._replicas] * len(columns)
        # Each part is its replica's row among rows of zeros, so that a sum gathers all rows.
        given = [
            [
                among_zeros(tf.convert_to_tensor(part)[tf.newaxis], 0, replica, self._replicas)
                for part, replica in zip(columns[index], self.local, strict=True)
            ]
            for index in there
        ]
        sums = self.sums(given)
        for index, total in zip(there, sums, strict=True):
            rows[index] = tf.unstack(total)
        return [
            keras.tree.pack_sequence_as(structures[0], [row[replica] for row in rows])
            for replica in range(self._replicas)
        ]

    def _ragged(self, parts: Parts) -> tf.RaggedTensor:
        flat, _ = self.concatenation([part.flat_values for part in parts], 0)
        levels = zip(*(part.nested_row_lengths() for part in parts), strict=True)
        lengths = [self.concatenation(level, 0)[0] for level in levels]
        ragged: Any = tf.RaggedTensor
        return ragged.from_nested_row_lengths(flat, lengths)

    def _sparse(self, parts: Parts) -> tf.SparseTensor:
        rows = self.from_all_replicas([part.dense_shape[0] for part in parts])
        begins = [tf.add_n([*rows[:replica], tf.zeros_like(rows[0])]) for replica in self.local]
        moved = []
        for part, begin in zip(parts, begins, strict=True):
            others = tf.zeros_like(part.dense_shape[1:])
            moved.append(part.indices + tf.concat([[begin], others], 0))
        values, _ = self.concatenation([part.values for part in parts], 0)
        indices, _ = self.concatenation(moved, 0)
        shape = tf.concat([[tf.add_n(rows)], parts[0].dense_shape[1:]], 0)
        return tf.SparseTensor(indices, values, shape)
