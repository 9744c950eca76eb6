"""All replicas of a strategy: how they divide a batch, and how their values are combined."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, final

import keras
import tensorflow as tf

from kerasdist import keras_compat
from kerasdist.api.options import CommunicationOptions
from kerasdist.backends.base.collectives import DEFAULT_COMMUNICATION
from kerasdist.backends.tensorflow.fit import gradients
from kerasdist.backends.tensorflow.fit.batches import (
    HOST,
    LocalRows,
    OwnRows,
    PlacedBatch,
    compared_of,
    known_size,
    own_rows,
    rows_on_devices,
    split,
)
from kerasdist.backends.tensorflow.private.prefetching import (
    PlacedBatches,
    can_prefetch,
    in_local_batches,
    untuned,
)
from kerasdist.backends.tensorflow.private.strategies import SharedSum, mirrored
from kerasdist.backends.tensorflow.replica.all_reduce import AllReduce, Column
from kerasdist.backends.tensorflow.replica.values import check_alike, concat
from kerasdist.backends.tensorflow.replica.variables import copies, native
from kerasdist.training.numerics import weighted

# One value's components on the replicas of this process, in the replicas' order.
Parts = Sequence[Any]


@final
class GlobalBatchDataset(tf.distribute.DistributedDataset):
    """A dataset of global batches that Keras treats as distributed already.

    Keras would hand a plain dataset to ``experimental_distribute_dataset``, which cuts it into
    unequal steps (TRAPS, 2), shards it by file, and warns about that.

    Attributes:
        begin: If set, makes each iterator; it gets the function that would make it otherwise.
        prefetched: Makes an iterator whose batches wait on the devices. Its state lacks the batches
            that it has read ahead, so a run that keeps its position cannot use it.
    """

    def __init__(self, iterate: Callable[[], Iterator[Any]], spec: Any) -> None:
        """Takes a function that makes an iterator, and the ``element_spec`` of a batch."""
        self._iterate = self.prefetched = iterate
        self._spec = spec
        self.begin: Callable[[Callable[[], Any]], Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        return self.prefetched() if self.begin is None else self.begin(self._iterate)

    @property
    def element_spec(self) -> Any:
        """The types and shapes of a global batch, as TensorFlow describes them."""
        return self._spec


def read_alike(
    pipeline: Any, cut: Callable[[tf.Tensor, Any], Any] = lambda _, batch: batch
) -> tf.data.Dataset:
    """Returns a dataset of ``cut(number, batch)`` of a pipeline's batches.

    It has the same operations for any number of workers, so that a backup of its iterator serves
    another number, too. What is read ahead are whole batches, which all workers need, so TensorFlow
    must not read ahead what `cut` returns.
    """
    whole = pipeline.prefetch(tf.data.AUTOTUNE)
    options = tf.data.Options()
    options.experimental_optimization.inject_prefetch = False
    return whole.enumerate().map(cut, synchronous=True).with_options(options)


class Group:
    """All replicas of a native strategy, in one process; `WorkerGroup` spans several workers.

    All workers must call the methods that take `Parts`, in cross-replica context.

    Attributes:
        native_strategy: The native strategy.
        is_of_workers: Whether other workers have replicas too.
        local: The numbers of the replicas in this process.
        shares_memory: Whether the replicas of this process read each other's tensors for free.
        is_recorded: Whether the user has asked for a record of collectives.
        runs_loops: Whether a custom loop has run; replicas' values may differ after one.
    """

    is_of_workers = False

    def __init__(
        self,
        native_strategy: tf.distribute.Strategy,
        all_reduce: AllReduce | None = None,
        *,
        shares_memory: bool,
        communication: CommunicationOptions = DEFAULT_COMMUNICATION,
    ) -> None:
        """Takes the native strategy; without `all_reduce`, values are summed on one device."""
        self.native_strategy = native_strategy
        self._communication = communication
        self._replicas = native_strategy.num_replicas_in_sync
        self.local = range(self._replicas)
        self.shares_memory = shares_memory
        self.is_recorded = all_reduce is not None and all_reduce.is_recorded
        self.runs_loops = False
        self._all_reduce = all_reduce

    def batches(self, adapter: Any, *, is_followed: bool) -> tf.distribute.DistributedDataset:
        """Returns a dataset of an adapter's batches; of a followed one a backup keeps the place."""
        dataset = adapter.get_tf_dataset()
        if keras_compat.is_array_adapter(adapter):
            return self._iterated(untuned(dataset))
        return self._iterated(read_alike(dataset) if is_followed else dataset)

    def _iterated(self, dataset: tf.data.Dataset) -> GlobalBatchDataset:
        """Returns a dataset whose batches go to the devices ahead, unless these share memory."""
        spec = dataset.element_spec
        is_whole = not isinstance(spec, OwnRows)
        plain = GlobalBatchDataset(partial(iter, dataset), spec if is_whole else spec.rows)
        if not self.shares_memory and can_prefetch(spec):
            total = known_size(spec) if is_whole else None
            parts = in_local_batches(dataset, self._parts_of)
            devices = self.native_strategy.extended.worker_devices
            plain.prefetched = PlacedBatches(parts, devices, total or 0).__iter__
        return plain

    def _parts_of(self, batch: object) -> list[OwnRows]:
        return [
            OwnRows(one.data, one.local_batch.size, one.local_batch.total, compared_of(batch) or ())
            for one in self._cut(batch)
        ]

    def distributed(
        self, dataset: tf.data.Dataset, options: tf.distribute.InputOptions
    ) -> tf.distribute.DistributedDataset:
        """Returns a dataset that yields a distributed value for each global batch."""
        return self.native_strategy.experimental_distribute_dataset(dataset, options)

    def split(self, batch: Any) -> list[LocalRows]:
        """Divides a batch for a step of `fit`, `evaluate` or `predict`.

        Returns one local batch for each replica of this process, each with at least one row.
        """
        if isinstance(batch, PlacedBatch):
            devices = self.native_strategy.extended.worker_devices
            return rows_on_devices(batch, self._replicas, self.local, devices)
        # Without a device, the whole batch would go to the first GPU, and from there to the others.
        with tf.device(HOST):
            return self._cut(batch)

    def _cut(self, batch: Any) -> list[LocalRows]:
        own = batch if isinstance(batch, OwnRows) else self.own_rows(batch)
        return split(own, len(self.local), stand_ins=True)

    def own_rows(self, batch: Any) -> OwnRows:
        """Takes the rows of this process out of a global batch."""
        return own_rows(batch, self._replicas, self.local)

    def sums(
        self,
        columns: Sequence[Parts],
        options: CommunicationOptions = DEFAULT_COMMUNICATION,
        *,
        here: bool = True,
    ) -> list[Any]:
        """Returns the sum over all replicas of each of several values, on one device if `here`."""
        results: list[Any] = [None] * len(columns)
        if self._all_reduce is not None:
            travelling = [i for i, parts in enumerate(columns) if self._travels(parts, here)]
            given = [self._column(columns[index]) for index in travelling]
            if options is DEFAULT_COMMUNICATION:
                options = self._communication
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
        if first is None or _are_slices(parts):
            return False
        # TensorFlow keeps int32 tensors on the host, whatever the device.
        return self.is_of_workers or not (here or first.dtype in (tf.int32, tf.bool))

    def _column(self, parts: Parts) -> Column:
        """Converts a value's parts to the tensors that the collective takes."""
        tensors = [tf.convert_to_tensor(part) for part in parts]
        check_alike(tensors)
        if not self.shares_memory:
            return tensors
        with tf.device(self.native_strategy.extended.worker_devices[0]):
            return [gradients.summed(tensors)]

    def _put_together(self, parts: Parts) -> Any:
        """Combines the parts of a value for which `_travels` is false; None if there are none."""
        parts = [part for part in parts if part is not None]
        if not parts or not _are_slices(parts):
            return gradients.summed(parts) if parts else None
        values, _ = self.concatenation([part.values for part in parts], 0)
        indices, _ = self.concatenation([part.indices for part in parts], 0)
        return gradients.slices_of_all(parts, values, indices)

    def concatenation(
        self, parts: Parts, axis: int, *, equal_sizes: bool = False
    ) -> tuple[Any, list[Any]]:
        """Concatenates all replicas' tensors; returns the result and each tensor's size."""
        check_alike(parts, axis)
        is_dense = not isinstance(parts[0], tf.SparseTensor | tf.RaggedTensor)
        return concat(parts, axis), [tf.shape(part)[axis] for part in parts] if is_dense else []

    def largest(self, parts: Parts) -> Any:
        """Returns the elementwise maximum over all replicas; None if the parts are None."""
        if parts[0] is None:
            return None
        rows, _ = self.concatenation([part[tf.newaxis] for part in parts], 0, equal_sizes=True)
        return tf.reduce_max(rows, 0)

    def costly(self, variables: Iterable[keras.Variable]) -> list[keras.Variable]:
        """Returns the variables whose components must be summed over the workers to be read."""
        # Not `native`: that is a read, before which deferred assignments are finished one by one.
        held = ((variable, keras_compat.stored_value(variable)) for variable in variables)
        return [one for one, own in held if isinstance(own, SharedSum) and not own.is_whole_here]

    def wholes(self, variables: Sequence[keras.Variable], sums: Sequence[Any]) -> list[tf.Tensor]:
        """Returns the variables' aggregated values, given the sums of their components."""
        totals = [copies(total)[0] for total in sums]
        return [
            tf.cast(total / self._replicas, total.dtype) if one.aggregation == "mean" else total
            for one, total in zip(variables, totals, strict=True)
        ]

    def mean_over_rows(self, structures: Sequence[Any], weights: Sequence[Any]) -> Any:
        """Combines what the steps of this process's replicas returned: floats by their mean.

        Of all else, and of what is equal on all replicas, it is the first replica's value.
        """

        def to_sum(parts: Parts) -> Parts:
            if parts[0].dtype.is_floating:
                return list(map(weighted, parts, weights))
            numbers = [tf.cast(one, tf.int32) if one.dtype == tf.bool else one for one in parts]
            pairs = zip(self.local, numbers, strict=True)
            return [one if replica == 0 else tf.zeros_like(one) for replica, one in pairs]

        columns = list(zip(*map(keras.tree.flatten, structures), strict=True))
        results = [parts[0] for parts in columns]
        numbers = {
            index: list(map(tf.convert_to_tensor, parts))
            for index, parts in enumerate(columns)
            if parts[0] is not None and tf.convert_to_tensor(parts[0]).dtype != tf.string
        }
        sums = self.sums(list(map(to_sum, numbers.values())))
        for (index, parts), total in zip(numbers.items(), sums, strict=True):
            results[index] = tf.cast(total, parts[0].dtype)
        return keras.tree.pack_sequence_as(structures[0], results)

    def mark_equal(self, variables: Iterable[keras.Variable]) -> None:
        """Lets this process read the variables without a collective until a custom loop has run."""
        for own in map(native, variables):
            if isinstance(own, SharedSum):
                own.is_equal = True

    def remember(self, variables: Sequence[keras.Variable], values: Sequence[tf.Tensor]) -> None:
        """Caches the values of `costly` variables, so that reading them needs no collective."""
        for variable, value in zip(variables, values, strict=True):
            native(variable).known = value

    def equalize(self, variables: Sequence[keras.Variable]) -> None:
        """Gives variables the chief's values, by one collective per type."""
        natives = [native(one) for one in variables]
        held = [copies(one) for one in natives]
        given = [
            tuple(
                # Replica 0's part serves all, even for a sum: `assign` divides its value equally.
                part.read_value() if replica == 0 else tf.zeros_like(part)
                for part, replica in zip(parts, self.local, strict=True)
            )
            for parts in held
        ]
        sums = self.sums(given)
        for own, parts, value in zip(natives, held, sums, strict=True):
            for part in parts:
                part.assign(value)
            if isinstance(own, SharedSum):
                own.remember_first()

    def average(self, variables: Sequence[keras.Variable]) -> None:
        """Sets each component of sync-on-read variables to the mean of all workers' components."""
        sums = self.sums([[part.read_value() for part in copies(one)] for one in variables])
        for variable, value in zip(variables, self.wholes(variables, sums), strict=True):
            variable.assign(value)


def _are_slices(parts: Parts) -> bool:
    return all(isinstance(part, tf.IndexedSlices) for part in parts if part is not None)
