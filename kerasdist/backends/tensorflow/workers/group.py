"""The replicas of a strategy as a group, which divides batches and combines the replicas' values.

With several workers, replicas exchange tensors only by all-reduce.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, final

import keras
import tensorflow as tf

from kerasdist import keras_compat
from kerasdist.api.options import CommunicationOptions
from kerasdist.backends.base.collectives import DEFAULT_COMMUNICATION
from kerasdist.backends.tensorflow.fit import gradients
from kerasdist.backends.tensorflow.fit.batches import (
    HOST,
    OwnRows,
    PlacedBatch,
    compared_in,
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
from kerasdist.backends.tensorflow.private.strategies import SharedSum, WorkersStrategy, mirrored
from kerasdist.backends.tensorflow.replica.all_reduce import AllReduce, Column
from kerasdist.backends.tensorflow.replica.values import (
    among_zeros,
    check_alike,
    concat,
    tensor_of_array,
)
from kerasdist.backends.tensorflow.replica.variables import copies, native
from kerasdist.input.autoshard import WorkerBatches
from kerasdist.training import numerics

if TYPE_CHECKING:
    from kerasdist.job.job import Job

# The components of one value on the replicas of this process, in the replicas' order.
Parts = Sequence[Any]

# A function that makes a dataset's iterator in a `fit` with backups, which save the iterator's
# state. Its argument is the function that makes the iterator in a `fit` without backups.
Begin = Callable[[Callable[[], Any]], Any]


@final
class GlobalBatchDataset(tf.distribute.DistributedDataset):
    """A dataset of global batches that Keras treats as already distributed.

    Keras would pass a plain dataset to ``experimental_distribute_dataset``. That method would form
    other batches, shard the dataset by file, and warn about the sharding.
    """

    def __init__(
        self, iterate: Callable[[], Iterator[Any]], spec: Any, begin: Begin | None = None
    ) -> None:
        """Stores a function that makes an iterator, and the ``element_spec`` of a batch."""
        self._iterate = iterate if begin is None else partial(begin, iterate)
        self._spec = spec

    def __iter__(self) -> Iterator[Any]:
        return self._iterate()

    @property
    def element_spec(self) -> Any:
        """The types and shapes of a global batch, in TensorFlow's form."""
        return self._spec


def read_alike(
    pipeline: Any, cut: Callable[[tf.Tensor, Any], Any] = lambda _, batch: batch
) -> tf.data.Dataset:
    """Returns a dataset of the results of ``cut``, which gets each batch's number and the batch.

    The dataset has the same operations for any number of workers, so a job with another number of
    workers can restore a backup of its iterator. For the same reason TensorFlow prefetches only
    whole batches, which are the same for all workers, and not the results of `cut`.
    """
    whole = pipeline.prefetch(tf.data.AUTOTUNE)
    options = tf.data.Options()
    options.experimental_optimization.inject_prefetch = False
    return whole.enumerate().map(cut, synchronous=True).with_options(options)


class Group:
    """All replicas of a native strategy in one process; `WorkerGroup` is for several workers.

    All workers must call the methods that take `Parts`, in cross-replica context.

    Attributes:
        native_strategy: The strategy of ``tf.distribute``.
        is_of_workers: Whether other workers have replicas too.
        local: The numbers of the replicas in this process.
        shares_memory: Whether the replicas of this process can read each other's tensors at no
            cost.
        is_recorded: Whether the user has asked for a record of collectives.
        has_collectives: Whether values are summed by collectives, and not on one device.
        runs_loops: Whether a custom loop has run, so that the replicas' values may differ.
    """

    is_of_workers = False

    def __init__(
        self,
        native_strategy: tf.distribute.Strategy,
        all_reduce: AllReduce | None = None,
        *,
        shares_memory: bool,
    ) -> None:
        """Stores the native strategy; without `all_reduce`, values are summed on one device."""
        self.native_strategy = native_strategy
        self._replicas = native_strategy.num_replicas_in_sync
        self.local = range(self._replicas)
        self.shares_memory = shares_memory
        self.has_collectives = all_reduce is not None
        self.is_recorded = all_reduce is not None and all_reduce.is_recorded
        self.runs_loops = False
        self._all_reduce = all_reduce

    def batches(self, adapter: Any, begin: Begin | None) -> tf.distribute.DistributedDataset:
        """Returns a dataset of an adapter's batches.

        `begin` makes the dataset's iterator, so that a backup can save it; None without backups.
        """
        dataset = adapter.get_tf_dataset()
        if keras_compat.is_array_adapter(adapter):
            return self._iterated(untuned(dataset), begin)
        return self._iterated(dataset if begin is None else read_alike(dataset), begin)

    def _iterated(self, dataset: tf.data.Dataset, begin: Begin | None) -> GlobalBatchDataset:
        """Returns a dataset that moves batches to the devices ahead of their steps, if possible.

        With `begin` batches are not moved ahead, because the saved state of an iterator would not
        contain the batches that wait on the devices. Nor are they moved ahead if the replicas share
        memory, because that would save no time.
        """
        spec = dataset.element_spec
        is_whole = not isinstance(spec, OwnRows)
        iterate: Callable[[], Any] = partial(iter, dataset)
        if begin is None and not self.shares_memory and can_prefetch(spec):
            total = known_size(spec) if is_whole else None
            parts = in_local_batches(dataset, self._cut)
            devices = self.native_strategy.extended.worker_devices
            iterate = PlacedBatches(parts, devices, total or 0).__iter__
        return GlobalBatchDataset(iterate, spec if is_whole else spec.rows, begin)

    def distributed(
        self, dataset: tf.data.Dataset, options: tf.distribute.InputOptions | None
    ) -> tf.distribute.DistributedDataset:
        """Returns a dataset that yields a distributed value for each global batch."""
        return self.native_strategy.experimental_distribute_dataset(dataset, options)

    def split(self, batch: Any) -> list[OwnRows]:
        """Divides a batch for a step of `fit`, `evaluate` or `predict`.

        Returns the rows of each replica of this process, at least one row for each.
        """
        if isinstance(batch, PlacedBatch):
            return rows_on_devices(batch, self._replicas, self.local)
        # Outside of this context, the whole batch would go to the first GPU, and from there to the
        # others.
        with tf.device(HOST):
            return self._cut(batch)

    def _cut(self, batch: Any) -> list[OwnRows]:
        own = batch if isinstance(batch, OwnRows) else self.own_rows(batch)
        return split(own, len(self.local), stand_ins=True)

    def own_rows(self, batch: Any) -> OwnRows:
        """Returns the rows of this process from a global batch."""
        return own_rows(batch, self._replicas, self.local)

    def sums(
        self,
        columns: Sequence[Parts],
        options: CommunicationOptions = DEFAULT_COMMUNICATION,
        *,
        here: bool = True,
    ) -> list[Any]:
        """Returns each value's sum over all replicas: on one device if `here`, else on each device.

        A column has the components of one value on the replicas of this process.
        """
        results: list[Any] = [None] * len(columns)
        if self._all_reduce is not None:
            travelling = [i for i, parts in enumerate(columns) if self._travels(parts, here)]
            given = [self._column(columns[index]) for index in travelling]
            sums = self._all_reduce.sums(given, options)
            for index, column in zip(travelling, sums, strict=True):
                results[index] = column[0] if here or self.shares_memory else mirrored(column)
        return [
            self._put_together(parts) if result is None else result
            for parts, result in zip(columns, results, strict=True)
        ]

    def _travels(self, parts: Parts, here: bool) -> bool:
        """Returns whether `sums` adds up a value by a collective, and not on one device."""
        first = next((part for part in parts if part is not None), None)
        if first is None or _are_slices(parts):
            return False
        # TensorFlow keeps int32 tensors on the host, whatever the device. So without other workers
        # they are summed on the host.
        return self.is_of_workers or not (here or first.dtype in (tf.int32, tf.bool))

    def _column(self, parts: Parts) -> Column:
        """Returns the tensors that this process gives to the collective for a value, one per lane.

        A lane is a device, or the whole process if its devices share memory.
        """
        tensors = [tf.convert_to_tensor(part) for part in parts]
        check_alike(tensors)
        if not self.shares_memory:
            return tensors
        with tf.device(self.native_strategy.extended.worker_devices[0]):
            return [gradients.summed(tensors)]

    def _put_together(self, parts: Parts) -> Any:
        """Combines a value's parts without a collective; None if there are no parts."""
        parts = [part for part in parts if part is not None]
        if not parts or not _are_slices(parts):
            return gradients.summed(parts) if parts else None
        values, _ = self.concatenation([part.values for part in parts], 0)
        indices, _ = self.concatenation([part.indices for part in parts], 0)
        return gradients.slices_of_all(parts, values, indices)

    def concatenation(
        self, parts: Parts, axis: int, *, equal_sizes: bool = False
    ) -> tuple[Any, list[Any]]:
        """Concatenates all replicas' tensors; returns the result, and the sizes along the axis.

        For sparse and ragged tensors no sizes are returned. With `equal_sizes` the tensors' sizes
        must be static and equal, so workers need not exchange the sizes.
        """
        check_alike(parts, axis)
        is_dense = not isinstance(parts[0], tf.SparseTensor | tf.RaggedTensor)
        return concat(parts, axis), [tf.shape(part)[axis] for part in parts] if is_dense else []

    def find_unsummed(self, variables: Iterable[keras.Variable]) -> list[keras.Variable]:
        """Returns the variables that can be read only by a sum over the workers."""
        # `native` is not used, because it reads the variable. A read would finish a deferred
        # assignment to this variable at once, by a separate collective.
        held = ((variable, keras_compat.stored_value(variable)) for variable in variables)
        return [one for one, own in held if isinstance(own, SharedSum) and not own.is_whole_here]

    def aggregate(
        self, variables: Sequence[keras.Variable], sums: Sequence[Any]
    ) -> list[tf.Tensor]:
        """Converts sums of variables' components to the variables' values: their sums or means."""
        totals = [copies(total)[0] for total in sums]
        return [
            tf.cast(total / self._replicas, total.dtype) if one.aggregation == "mean" else total
            for one, total in zip(variables, totals, strict=True)
        ]

    def mean_over_rows(self, structures: Sequence[Any], weights: Sequence[Any]) -> Any:
        """Combines the replicas' results of a step, as `numerics.mean_over_rows` describes."""
        return numerics.mean_over_rows(structures, weights, self.local, self.sums)

    def mark_equal_statistics(self, layers: Iterable[keras.Layer]) -> None:
        """Records that moving statistics are equal on all replicas, so reads need no collective.

        This holds until a custom loop has run.
        """
        for layer in layers:
            if isinstance(layer, keras.layers.BatchNormalization) and layer.built:
                for own in map(native, (layer.moving_mean, layer.moving_variance)):
                    if isinstance(own, SharedSum):
                        own.is_equal = True

    def remember(self, variables: Sequence[keras.Variable], values: Sequence[tf.Tensor]) -> None:
        """Caches the values of `SharedSum` variables, so that reading them needs no collective."""
        for variable, value in zip(variables, values, strict=True):
            native(variable).known = value

    def equalize(self, variables: Sequence[keras.Variable]) -> None:
        """Gives variables the chief's values. One collective sends the values of many variables."""
        natives = [native(one) for one in variables]
        held = [copies(one) for one in natives]
        given = [
            tuple(
                # All components get the value of replica 0's component. This does not change the
                # value of a variable that is read as a sum, because `assign` has divided the value
                # equally over the components. The exception is an integer that cannot be divided
                # equally: its first component also has the remainder.
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
        """Sets each component of sync-on-read variables to the mean over all replicas."""
        sums = self.sums([[part.read_value() for part in copies(one)] for one in variables])
        for variable, value in zip(variables, self.aggregate(variables, sums), strict=True):
            variable.assign(value)


@final
class WorkerGroup(Group):
    """The replicas of all workers; each worker has the same number of replicas."""

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
        lanes = own[:1] if shares_memory else own
        all_reduce = AllReduce(lanes, native_strategy.group_key, job, communication)
        super().__init__(native_strategy, all_reduce, shares_memory=shares_memory)
        self.local = range(job.rank * len(own), (job.rank + 1) * len(own))

    def batches(self, adapter: Any, begin: Begin | None) -> tf.distribute.DistributedDataset:
        """Returns a dataset of this worker's rows; if the data is arrays, reads only these rows."""
        if isinstance(adapter, WorkerBatches):
            return dataset_of_shards(adapter, begin)
        if not keras_compat.takes_rows(adapter):

            def rows_and_compared(number: tf.Tensor, batch: Any) -> OwnRows:
                return self.own_rows(batch)._replace(compared=compared_in(number, batch))

            return self._iterated(read_alike(adapter.get_tf_dataset(), rows_and_compared), begin)
        own = keras_compat.tensorflow_rows(
            adapter,
            lambda numbers: self.own_rows(numbers).rows,
            lambda rows, numbers: self.own_rows(numbers)._replace(rows=rows),
        )
        return self._iterated(untuned(own.prefetch(tf.data.AUTOTUNE)), begin)

    def distributed(
        self, dataset: tf.data.Dataset, options: tf.distribute.InputOptions | None
    ) -> tf.distribute.DistributedDataset:
        """Returns a dataset of this worker's local batches, divided as in `fit`.

        ``tf.distribute`` would shard the files or examples over the workers before it batches them,
        which would give other batches than on one device.
        """
        local_rows = in_local_batches(
            dataset, lambda batch: rows_of_replicas(batch, self._replicas, self.local)
        )
        return self.native_strategy.distribute_datasets_from_function(lambda _: local_rows, options)

    def concatenation(
        self, parts: Parts, axis: int, *, equal_sizes: bool = False
    ) -> tuple[Any, list[Any]]:
        """Concatenates by all-reduce: sums tensors that are padded with zeros to the total size."""
        first = parts[0]
        if isinstance(first, tf.RaggedTensor):
            return self._ragged(parts), []
        if isinstance(first, tf.SparseTensor):
            return self._sparse(parts), []
        check_alike(parts, axis)
        if equal_sizes:  # callers pass `equal_sizes` only if the size is static
            sizes = [first.shape[axis]] * self._replicas
        else:
            sizes = self._from_all_replicas([tf.shape(part)[axis] for part in parts])
        begins = [tf.add_n(sizes[:replica]) if replica else 0 for replica in self.local]
        total = tf.add_n(sizes)
        is_bool = first.dtype == tf.bool
        placed = [
            among_zeros(tf.cast(part, tf.int32) if is_bool else part, axis, begin, total)
            for part, begin in zip(parts, begins, strict=True)
        ]
        [whole] = self.sums([placed])
        return tf.cast(whole, tf.bool) if is_bool else whole, sizes

    def _from_all_replicas(self, sizes: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Gathers the sizes of all replicas' tensors from all workers."""
        # Each replica has a vector with its own size and zeros, so the sum has all sizes.
        vectors = [
            among_zeros(size[tf.newaxis], 0, replica, self._replicas)
            for size, replica in zip(sizes, self.local, strict=True)
        ]
        [total] = self.sums([vectors])
        return tf.unstack(total)

    def _ragged(self, parts: Parts) -> tf.RaggedTensor:
        flat, _ = self.concatenation([part.flat_values for part in parts], 0)
        levels = zip(*(part.nested_row_lengths() for part in parts), strict=True)
        lengths = [self.concatenation(level, 0)[0] for level in levels]
        ragged: Any = tf.RaggedTensor
        return ragged.from_nested_row_lengths(flat, lengths)

    def _sparse(self, parts: Parts) -> tf.SparseTensor:
        rows = self._from_all_replicas([part.dense_shape[0] for part in parts])
        begins = [tf.add_n([*rows[:replica], tf.zeros_like(rows[0])]) for replica in self.local]
        moved = []
        for part, begin in zip(parts, begins, strict=True):
            others = tf.zeros_like(part.dense_shape[1:])
            moved.append(part.indices + tf.concat([[begin], others], 0))
        values, _ = self.concatenation([part.values for part in parts], 0)
        indices, _ = self.concatenation(moved, 0)
        shape = tf.concat([[tf.add_n(rows)], parts[0].dense_shape[1:]], 0)
        return tf.SparseTensor(indices, values, shape)


def dataset_of_shards(batches: WorkerBatches, begin: Begin | None) -> GlobalBatchDataset:
    """Returns a dataset of this worker's rows, for jobs whose workers each read a shard of data."""

    def iterate() -> Iterator[OwnRows]:
        for own in batches:
            rows = keras.tree.map_structure(tensor_of_array, own.rows if own.size else own.like)
            yield OwnRows(rows, tf.constant(own.size), tf.constant(own.total))

    return GlobalBatchDataset(iterate, _spec(batches), begin)


def _spec(batches: WorkerBatches) -> Any:
    """Returns the types and shapes of a batch, as an ``element_spec``."""
    dataset = batches.source.dataset
    if isinstance(dataset, tf.data.Dataset):
        return dataset.element_spec
    return keras.tree.map_structure(_spec_of, batches.form())


def _spec_of(leaf: Any) -> Any:
    leaf = tensor_of_array(leaf)
    if leaf is None or leaf.shape.rank == 0:
        return leaf
    return tf.TensorSpec([None, *leaf.shape[1:]], leaf.dtype)


def rows_of_replicas(batch: object, replicas: int, own: range) -> list[Any]:
    """Returns the rows of each replica in `own`. A replica without rows gets no stand-in row."""
    return [one.rows for one in split(own_rows(batch, replicas, own), len(own), stand_ins=False)]


def _are_slices(parts: Parts) -> bool:
    return all(isinstance(part, tf.IndexedSlices) for part in parts if part is not None)
