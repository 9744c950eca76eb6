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
    on_host,
    parts_of,
    pieces_of_placed,
    split_in_graph,
)
from kerasdist.backends.tensorflow.private.prefetching import (
    PlacedBatches,
    can_prefetch,
    in_local_batches,
    untuned,
)
from kerasdist.backends.tensorflow.private.strategies import mirrored
from kerasdist.backends.tensorflow.replica.all_reduce import AllReduce, Column
from kerasdist.backends.tensorflow.replica.values import check_alike, concat
from kerasdist.backends.tensorflow.replica.variables import copies
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
    """

    def __init__(
        self,
        iterate: Callable[[], Iterator[Any]],
        spec: Any,
        prefetched: Callable[[], Iterator[Any]] | None = None,
    ) -> None:
        """Takes a function that makes an iterator, and the ``element_spec`` of a batch.

        `prefetched` makes an iterator whose batches wait on the devices. Its state
        lacks the batches that it has read ahead, so a run that keeps its position cannot use it.
        """
        self._iterate = iterate
        self._prefetched = prefetched or iterate
        self._spec = spec
        self.begin: Callable[[Callable[[], Any]], Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        return self._prefetched() if self.begin is None else self.begin(self._iterate)

    @property
    def element_spec(self) -> Any:
        """The types and shapes of a global batch, as TensorFlow describes them."""
        return self._spec


class Group:
    """All replicas of a native strategy, in one process; `WorkerGroup` spans several workers.

    All workers must call the methods that take `Parts`, in cross-replica context.

    Attributes:
        native_strategy: The native strategy.
        local: The numbers of the replicas in this process.
        shares_memory: Whether the replicas of this process read each other's tensors for free.
        is_recorded: Whether the user has asked for a record of collectives.
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
        self.is_recorded = all_reduce is not None and all_reduce.is_recorded
        self.runs_loops = False
        self._all_reduce = all_reduce

    def batches(self, adapter: Any) -> tf.distribute.DistributedDataset:
        """Returns a dataset of a Keras data adapter's batches, as `split_in_graph` takes them."""
        dataset = adapter.get_tf_dataset()
        is_array = keras_compat.is_array_adapter(adapter)
        spec = dataset.element_spec
        return self._iterated(untuned(dataset) if is_array else dataset, spec, spec)

    def _iterated(self, dataset: tf.data.Dataset, spec: Any, sized: Any) -> GlobalBatchDataset:
        """Returns a dataset whose batches go to the devices ahead, unless these share memory.

        `sized` has the static sizes of the global batches, None if nothing has.
        """
        plain = partial(iter, dataset)
        if self.shares_memory or not can_prefetch(dataset.element_spec):
            return GlobalBatchDataset(plain, spec)
        parts = in_local_batches(dataset, self._parts_of)
        devices = self.native_strategy.extended.worker_devices
        total = None if sized is None else known_size(sized)
        return GlobalBatchDataset(plain, spec, PlacedBatches(parts, devices, total or 0).__iter__)

    def _parts_of(self, batch: object) -> list[OwnRows]:
        return parts_of(self._cut(batch), compared_of(batch) or ())

    def on_host(self, batch: Any) -> Any:
        """Returns a global batch as the pipeline made it."""
        return on_host(batch).rows if isinstance(batch, PlacedBatch) else batch

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
            replicas = self.native_strategy.num_replicas_in_sync
            devices = self.native_strategy.extended.worker_devices
            return pieces_of_placed(batch, replicas, self.local, devices)
        # Without a device, the whole batch would go to the first GPU, and from there to the others.
        with tf.device(HOST):
            return self._cut(batch)

    def _cut(self, batch: Any) -> list[LocalRows]:
        return split_in_graph(batch, len(self.local), stand_ins=True)

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

    def largest(self, parts: Parts) -> Any:
        """Returns the elementwise maximum over all replicas; None if the parts are None."""
        if parts[0] is None:
            return None
        rows, _ = self.concatenation([part[tf.newaxis] for part in parts], 0, equal_sizes=True)
        return tf.reduce_max(rows, 0)

    def costly(self, variables: Iterable[keras.Variable]) -> list[keras.Variable]:
        """Returns those variables whose reading would cost a collective."""
        del variables  # all components are in this process
        return []

    def wholes(self, variables: Sequence[keras.Variable], sums: Sequence[Any]) -> list[tf.Tensor]:
        """Returns the variables' aggregated values, given the sums of their components."""
        replicas = self.native_strategy.num_replicas_in_sync
        totals = [copies(total)[0] for total in sums]
        return [
            tf.cast(total / replicas, total.dtype) if one.aggregation == "mean" else total
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

    def mark_equal(self, variables: Sequence[keras.Variable]) -> None:
        """Marks variables to which all replicas assign equal values in `fit`."""
        del variables  # all replicas are in this process

    def remember(self, variables: Sequence[keras.Variable], values: Sequence[tf.Tensor]) -> None:
        """Caches the aggregated values of variables, which a step has read."""
        del variables, values  # reading them costs nothing

    def equalize(self, variables: Sequence[keras.Variable]) -> None:
        """Gives variables the chief's values."""
        del variables  # all replicas are in this process

    def average(self, variables: Sequence[keras.Variable]) -> None:
        """Sets each component of sync-on-read variables to the mean of all workers' components."""
        sums = self.sums([[part.read_value() for part in copies(one)] for one in variables])
        for variable, value in zip(variables, self.wholes(variables, sums), strict=True):
            variable.assign(value)
