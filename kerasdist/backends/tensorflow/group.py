"""All replicas of a strategy: how they divide a batch, and how their values are combined."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from functools import cached_property, partial
from typing import Any

import tensorflow as tf

from kerasdist import keras_compat
from kerasdist.backends.collectives import DEFAULT_COMMUNICATION
from kerasdist.backends.tensorflow import gradients
from kerasdist.backends.tensorflow.all_reduce import AllReduce, Column
from kerasdist.backends.tensorflow.batches import (
    HOST,
    Piece,
    PlacedBatch,
    beginnings_of,
    known_size,
    on_host,
    parts_of,
    pieces,
    pieces_of_placed,
)
from kerasdist.backends.tensorflow.datasets import GlobalBatchDataset
from kerasdist.backends.tensorflow.division import Division
from kerasdist.backends.tensorflow.prefetching import can_prefetch, in_a_row, prefetched, untuned
from kerasdist.backends.tensorflow.private.strategies import mirrored
from kerasdist.backends.tensorflow.values import among_zeros, check_alike, concat
from kerasdist.backends.tensorflow.variables import copies
from kerasdist.collectives import CommunicationOptions

# One value's components on the replicas of this process, in the replicas' order.
Parts = Sequence[Any]


class Group:
    """All replicas of a native strategy, in one process; `WorkerGroup` spans several workers.

    All workers must call the methods that take `Parts`, in cross-replica context.

    Attributes:
        native_strategy: The native strategy.
        local: The numbers of the replicas in this process.
        shares_memory: Whether the replicas of this process read each other's tensors for free.
        has_collectives: Whether sums are collectives, not operations on one device.
        runs_loops: Whether a custom loop has run; replicas' values may differ after one.
    """

    def __init__(
        self,
        native_strategy: tf.distribute.Strategy,
        all_reduce: AllReduce | None = None,
        *,
        shares_memory: bool,
    ) -> None:
        """Takes the native strategy; without `all_reduce`, values are summed on one device."""
        self.native_strategy = native_strategy
        self.local = range(native_strategy.num_replicas_in_sync)
        self.shares_memory = shares_memory
        self.has_collectives = all_reduce is not None
        self.runs_loops = False
        self._all_reduce = all_reduce

    def batches(self, adapter: Any) -> tf.distribute.DistributedDataset:
        """Returns a dataset of a Keras data adapter's batches, in the form that `pieces` takes."""
        dataset = adapter.get_tf_dataset()
        is_array = keras_compat.is_array_adapter(adapter)
        spec = dataset.element_spec
        return self._iterated(dataset, spec, spec, is_of_arrays=is_array)

    def _iterated(
        self, dataset: tf.data.Dataset, spec: Any, sized: Any, *, is_of_arrays: bool
    ) -> GlobalBatchDataset:
        """Returns a dataset whose batches go to the devices ahead, unless these share memory.

        `sized` has the static sizes of the global batches, None if nothing has.
        """
        plain = partial(iter, untuned(dataset) if is_of_arrays else dataset)
        if self.shares_memory or not can_prefetch(dataset.element_spec):
            return GlobalBatchDataset(plain, spec)
        devices = self.native_strategy.extended.worker_devices
        total = None if sized is None else known_size(sized)
        ahead = prefetched(dataset, self._divided, devices, total, is_of_arrays=is_of_arrays)
        return GlobalBatchDataset(plain, spec, ahead)

    @cached_property
    def _divided(self) -> Any:
        """A compiled function of a batch, which returns a dataset of its parts."""

        def divided(batch: Any) -> tf.data.Dataset:
            return in_a_row(parts_of(self._cut(batch), beginnings_of(batch)))

        return tf.function(divided, autograph=False)

    def on_host(self, batch: Any) -> Any:
        """Returns a global batch as the pipeline made it."""
        return on_host(batch).rows if isinstance(batch, PlacedBatch) else batch

    def distributed(
        self, dataset: tf.data.Dataset, options: tf.distribute.InputOptions
    ) -> tf.distribute.DistributedDataset:
        """Returns a dataset that yields a distributed value for each global batch."""
        return self.native_strategy.experimental_distribute_dataset(dataset, options)

    def pieces(self, batch: Any) -> list[Piece]:
        """Divides a batch for a step of `fit`, `evaluate` or `predict`.

        Returns one piece for each replica of this process, each with at least one row.
        """
        if isinstance(batch, PlacedBatch):
            replicas = self.native_strategy.num_replicas_in_sync
            devices = self.native_strategy.extended.worker_devices
            return pieces_of_placed(batch, replicas, self.local, devices)
        # Without a device, the whole batch would go to the first GPU, and from there to the others.
        with tf.device(HOST):
            return self._cut(batch)

    def _cut(self, batch: Any) -> list[Piece]:
        return pieces(batch, len(self.local), stand_ins=True)

    def sums(
        self,
        columns: Sequence[Parts],
        options: CommunicationOptions = DEFAULT_COMMUNICATION,
        *,
        here: bool = True,
    ) -> list[Any]:
        """Returns the sum over all replicas of each of several values, on one device if `here`."""
        results: list[Any] = [None] * len(columns)
        travelling = [index for index, parts in enumerate(columns) if self._travels(parts, here)]
        if self._all_reduce is not None:
            given = [self._column(columns[index]) for index in travelling]
            sums = self._all_reduce.sums(given, options)
            for index, column in zip(travelling, sums, strict=True):
                results[index] = column[0] if here or self.shares_memory else mirrored(column)
        return [
            self._put_together(parts) if result is None else result
            for parts, result in zip(columns, results, strict=True)
        ]

    def _travels(self, parts: Parts, here: bool) -> bool:
        """Whether `sums` adds up a value by a collective rather than on one device."""
        first = next((part for part in parts if part is not None), None)
        if here or self._all_reduce is None or first is None:
            return False
        # TensorFlow keeps int32 tensors on the host, whatever the device.
        return not isinstance(first, tf.IndexedSlices) and first.dtype not in (tf.int32, tf.bool)

    def _column(self, parts: Parts) -> Column:
        """Converts a value's parts to the tensors that the collective takes."""
        return [tf.convert_to_tensor(part) for part in parts]

    def _put_together(self, parts: Parts) -> Any:
        """Combines the parts of a value for which `_travels` is false."""
        return gradients.summed(parts)

    def concatenation(
        self, parts: Parts, axis: int, *, equal_sizes: bool = False
    ) -> tuple[Any, list[Any]]:
        """Concatenates all replicas' tensors; returns the result and each tensor's size."""
        del equal_sizes
        check_alike(parts, axis)
        is_dense = not isinstance(parts[0], tf.SparseTensor | tf.RaggedTensor)
        return concat(parts, axis), [tf.shape(part)[axis] for part in parts] if is_dense else []

    def joined(
        self, columns: Sequence[Parts], divisions: Sequence[Division], *, here: bool = True
    ) -> list[Any]:
        """Returns values of which each replica has a part; on one device if `here`."""
        all_are_local = len(self.local) == self.native_strategy.num_replicas_in_sync
        if all_are_local and (here or self.shares_memory):
            with tf.device(HOST) if here else nullcontext():
                pairs = zip(columns, divisions, strict=True)
                return [tf.concat(parts, division.axis) for parts, division in pairs]
        placed = []
        for parts, division in zip(columns, divisions, strict=True):
            axis, total = division.axis, division.shape[division.axis]
            placed.append([])
            for index, part in enumerate(parts):
                with tf.device(self.native_strategy.extended.worker_devices[index]):
                    placed[-1].append(among_zeros(part, axis, division.begin(index), total))
        return self.sums(placed, here=here)

    def largest(self, parts: Parts) -> Any:
        """Returns the elementwise maximum over all replicas; None if the parts are None."""
        if parts[0] is None:
            return None
        rows, _ = self.concatenation([part[tf.newaxis] for part in parts], 0, equal_sizes=True)
        return tf.reduce_max(rows, 0)

    def costly(self, variables: Iterable[Any]) -> list[Any]:
        """Returns those variables whose reading would cost a collective."""
        del variables  # all components are in this process
        return []

    def wholes(self, variables: Sequence[Any], sums: Sequence[Any]) -> list[tf.Tensor]:
        """Returns the variables' aggregated values, given the sums of their components."""
        replicas = self.native_strategy.num_replicas_in_sync
        totals = [copies(total)[0] for total in sums]
        return [
            tf.cast(total / replicas, total.dtype) if one.aggregation == "mean" else total
            for one, total in zip(variables, totals, strict=True)
        ]

    def from_all_replicas(self, structures: Sequence[Any]) -> list[Any]:
        """Gathers one structure per replica from all workers."""
        return list(structures)

    def mark_equal(self, variables: Sequence[Any]) -> None:
        """Marks variables to which all replicas assign equal values in `fit`."""
        del variables  # all replicas are in this process

    def remember(self, variables: Sequence[Any], values: Sequence[tf.Tensor]) -> None:
        """Caches the aggregated values of variables, which a step has read."""
        del variables, values  # reading them costs nothing

    def equalize(self, variables: Sequence[Any]) -> None:
        """Gives variables the chief's values."""
        del variables  # all replicas are in this process

    def average(self, variables: Sequence[Any]) -> None:
        """Sets each component of sync-on-read variables to the components' mean."""
        for variable in variables:
            parts = [part.numpy() for part in copies(variable)]
            if any((part != parts[0]).any() for part in parts[1:]):
                variable.assign(variable.value)
