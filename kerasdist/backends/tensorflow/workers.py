"""Replicas on many workers. All that crosses between them is sums: one collective serves all."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, final

import keras
import tensorflow as tf

from kerasdist.backends.collectives import DEFAULT_COMMUNICATION
from kerasdist.backends.tensorflow import first_batches
from kerasdist.backends.tensorflow.batches import OwnRows, Piece, own_rows, pieces_of_own
from kerasdist.backends.tensorflow.components import check_alike
from kerasdist.backends.tensorflow.engine_seam import mirrored
from kerasdist.backends.tensorflow.gradients import summed
from kerasdist.backends.tensorflow.groups import Group, Parts
from kerasdist.backends.tensorflow.pipelines import GlobalBatchDataset
from kerasdist.backends.tensorflow.transport import Column, Lanes, Transport
from kerasdist.backends.tensorflow.variables import native
from kerasdist.backends.tensorflow.workers_seam import SharedSum, WorkersStrategy
from kerasdist.collectives import CommunicationOptions

if TYPE_CHECKING:
    from kerasdist.job.job import Job


@final
class WorkerGroup(Group):
    """The replicas of all workers, each worker with as many."""

    engine: WorkersStrategy

    def __init__(
        self,
        engine: WorkersStrategy,
        job: Job,
        communication: CommunicationOptions,
        *,
        shares_memory: bool,
    ) -> None:
        """Makes the group.

        Args:
            engine: ``tf.distribute.MultiWorkerMirroredStrategy``.
            job: The job of this process.
            communication: How sums travel that are not told otherwise; it has a time-out.
            shares_memory: Whether the devices of this worker share their memory.
        """
        super().__init__(engine, shares_memory=shares_memory)
        self._devices = engine.extended.worker_devices
        self._rank = job.rank
        devices = self._devices[:1] if shares_memory else self._devices
        timeout = communication.timeout_seconds or 0.0
        self._communication = replace(communication, timeout_seconds=None)

        def seconds_to_wait() -> float:
            """Leaves the waiting to the job where that ends as soon as nothing moves.

            TensorFlow starts two threads for each collective with a time-out, which sleep to the
            end of it, however soon the collective is done. 50 steps a second with 10 minutes each
            are 60,000 threads, of which the process dies (seen with 2.21:
            base_collective_executor.cc would have a thread do it for all).
            """
            return 0.0 if job.is_watched else timeout

        lanes = Lanes(devices, workers=engine.num_workers, key=engine.group_key)
        self._transport = Transport(lanes, seconds_to_wait)

    @property
    def local(self) -> range:
        """The numbers of this worker's replicas."""
        count = len(self._devices)
        return range(self._rank * count, (self._rank + 1) * count)

    @property
    def is_divided(self) -> bool:
        """The other workers hold a part."""
        return True

    @property
    def _replicas(self) -> int:
        return self.engine.num_replicas_in_sync

    def note_loop(self) -> None:
        """Notes that a custom loop runs; the engine must know."""
        super().note_loop()
        self.engine.extended.runs_loops = True

    @contextmanager
    def calling(self) -> Iterator[None]:
        """Lets variables be read without the other workers, as far as their values are known."""
        extended = self.engine.extended
        extended.calls += 1
        try:
            yield
        finally:
            extended.calls -= 1

    def batches(self, dataset: tf.data.Dataset) -> tf.distribute.DistributedDataset:
        """Returns a dataset of this worker's rows."""

        def mine(number: tf.Tensor, batch: Any) -> OwnRows:
            own = own_rows(batch, self._replicas, self.local)
            return own._replace(beginnings=first_batches.beginnings_of_first(number, batch))

        own = dataset.enumerate().map(mine).prefetch(tf.data.AUTOTUNE)
        spec: Any = own.element_spec
        return GlobalBatchDataset(own, spec.rows)

    def distributed(
        self, dataset: tf.data.Dataset, options: tf.distribute.InputOptions
    ) -> tf.distribute.DistributedDataset:
        """Returns a dataset of the pieces that `fit` would make.

        ``tf.distribute`` would let each worker see every second file or example, in batches of its
        own: other batches than one device has.
        """
        # tf.data calls with the members of a tuple, and with anything else as it is.
        is_tuple = type(dataset.element_spec) is tuple

        def in_pieces(*batch: Any) -> tf.data.Dataset:
            own = own_rows(batch if is_tuple else batch[0], self._replicas, self.local)
            mine = [piece.data for piece in self._divided(own, stand_ins=False)]
            each = [tf.data.Dataset.from_tensors(data) for data in mine]
            return functools.reduce(tf.data.Dataset.concatenate, each)

        pieces = dataset.flat_map(in_pieces)
        return self.engine.distribute_datasets_from_function(lambda _: pieces, options)

    def pieces(self, batch: Any) -> list[Piece]:
        """Divides this worker's rows."""
        if not isinstance(batch, OwnRows):
            batch = own_rows(batch, self._replicas, self.local)
        return self._divided(batch, stand_ins=True)

    def _divided(self, batch: OwnRows, *, stand_ins: bool) -> list[Piece]:
        return pieces_of_own(batch, len(self.local), stand_ins=stand_ins)

    def sums(
        self,
        columns: Sequence[Parts],
        options: CommunicationOptions = DEFAULT_COMMUNICATION,
        *,
        here: bool = True,
    ) -> list[Any]:
        """Returns sums, all of a type in one collective, or in packs of the size that is set."""
        if options is DEFAULT_COMMUNICATION:
            options = self._communication
        results: list[Any] = [None] * len(columns)
        dense: list[int] = []
        for index, parts in enumerate(columns):
            if all(isinstance(part, tf.IndexedSlices) for part in parts):
                results[index] = self._slices(parts)
            elif parts[0] is not None:
                dense.append(index)
        sums = self._transport.sums([self._column(columns[index]) for index in dense], options)
        for index, column in zip(dense, sums, strict=True):
            results[index] = column[0] if here or self.shares_memory else mirrored(column)
        return results

    def sums_of_gradients(
        self, columns: Sequence[Parts], variables: Sequence[Any], *, here: bool
    ) -> list[Any]:
        """Returns sums, all of a type in one collective."""
        del variables
        return self.sums(columns, here=here)

    def concatenation(
        self, parts: Parts, axis: int, *, equal_sizes: bool = False
    ) -> tuple[Any, list[Any]]:
        """Returns the tensors one after another: each is put among zeros, and all are summed."""
        first = parts[0]
        if isinstance(first, tf.RaggedTensor):
            return self._ragged(parts), []
        if isinstance(first, tf.SparseTensor):
            return self._sparse(parts), []
        check_alike(parts, axis)
        sizes = [self._static_size(first, axis)] * self._replicas
        if not equal_sizes:
            sizes = self._sizes(parts, axis)
        begins = [tf.add_n(sizes[:replica]) if replica else 0 for replica in self.local]
        total = tf.add_n(sizes)

        def among_zeros(part: Any, begin: Any, size: Any) -> Any:
            around = [[0, 0]] * part.shape.rank
            around[axis] = [begin, total - begin - size]
            return tf.pad(part, around)

        placed = [
            among_zeros(part, begin, sizes[replica])
            for part, begin, replica in zip(parts, begins, self.local, strict=True)
        ]
        return self._whole(placed, first), sizes

    def average(self, variables: Sequence[Any]) -> None:
        """Averages all of them, since nobody knows of the other workers' parts."""
        for variable, value in zip(variables, self._read(variables), strict=True):
            variable.assign(value)

    def everyones(self, structures: Sequence[Any]) -> list[Any]:
        """Returns what each replica has, at one collective for all of a type."""
        columns = list(zip(*(keras.tree.flatten(one) for one in structures), strict=True))
        there = [index for index, parts in enumerate(columns) if parts[0] is not None]
        rows: list[Sequence[Any]] = [[None] * self._replicas] * len(columns)
        sums = self.sums([self._rows_of_parts(columns[index]) for index in there])
        for index, total in zip(there, sums, strict=True):
            rows[index] = tf.unstack(total)
        return [
            keras.tree.pack_sequence_as(structures[0], [row[replica] for row in rows])
            for replica in range(self._replicas)
        ]

    def _rows_of_parts(self, parts: Parts) -> Parts:
        """Each part as the row of its replica, among zeros."""
        tensors = [tf.convert_to_tensor(part) for part in parts]
        return [
            tf.pad(
                tensor[tf.newaxis],
                [[replica, self._replicas - 1 - replica], *[[0, 0]] * tensor.shape.rank],
            )
            for tensor, replica in zip(tensors, self.local, strict=True)
        ]

    def costly(self, variables: Sequence[Any]) -> list[Any]:
        """Returns those of which only a part is here."""
        natives = ((variable, native(variable)) for variable in variables)
        return [one for one, own in natives if isinstance(own, SharedSum) and not own.is_whole_here]

    def note(self, variables: Sequence[Any], values: Sequence[tf.Tensor]) -> None:
        """Lets the variables be read without the other workers until something writes to them."""
        for variable, value in zip(variables, values, strict=True):
            native(variable).know(value)

    def note_equal(self, variables: Sequence[Any]) -> None:
        """Lets the variables be read without the other workers, while no custom loop runs."""
        for variable in variables:
            native(variable).know_equal()

    def equalize(self, variables: Sequence[Any]) -> None:
        """Gives variables the chief's values, at one collective for all of a type.

        Args:
            variables: Keras variables.
        """
        natives = [native(one) for one in variables]
        copies = [list(self.engine.experimental_local_results(one)) for one in natives]
        given = [
            tuple(
                # Of a sum it is the first replica's part: `assign` gave each as much.
                part.read_value() if replica == 0 else tf.zeros_like(part)
                for part, replica in zip(parts, self.local, strict=True)
            )
            for parts in copies
        ]
        sums = self.sums(given)
        for parts, value in zip(copies, sums, strict=True):
            for part in parts:
                part.assign(value)
        for one in natives:
            if isinstance(one, SharedSum):
                one.know_first()

    def _read(self, variables: Sequence[Any]) -> list[tf.Tensor]:
        copies = [
            self.engine.experimental_local_results(native(variable)) for variable in variables
        ]
        parts = [tuple(part.read_value() for part in one) for one in copies]
        return self.wholes(variables, self.sums(parts))

    def _column(self, parts: Parts) -> Column:
        tensors = [tf.convert_to_tensor(part) for part in parts]
        check_alike(tensors)
        if not self.shares_memory:
            return tensors
        with tf.device(self._transport.lanes.here[0]):
            return [summed(tensors)]

    def _whole(self, placed: Parts, like: Any) -> Any:
        dtype = like.dtype
        if dtype == tf.bool:
            placed = [tf.cast(part, tf.int32) for part in placed]
        [whole] = self.sums([placed])
        return tf.cast(whole, dtype) if dtype == tf.bool else whole

    def _static_size(self, tensor: Any, axis: int) -> Any:
        return tf.shape(tensor)[axis] if tensor.shape[axis] is None else tensor.shape[axis]

    def _sizes(self, parts: Parts, axis: int) -> list[Any]:
        return self._everyones([tf.shape(part)[axis] for part in parts])

    def _everyones(self, numbers: Parts) -> list[Any]:
        """A number of each replica, one of those of this process given each."""
        rows = [
            tf.one_hot(replica, self._replicas, number, 0, dtype=number.dtype)
            for replica, number in zip(self.local, numbers, strict=True)
        ]
        [row] = self.sums([rows])
        return tf.unstack(row)

    def _slices(self, parts: Parts) -> tf.IndexedSlices:
        """The rows one after another, as one device has them for the whole batch."""
        values, _ = self.concatenation([part.values for part in parts], 0)
        indices, _ = self.concatenation([part.indices for part in parts], 0)
        return tf.IndexedSlices(values, indices, parts[0].dense_shape)

    def _ragged(self, parts: Parts) -> tf.RaggedTensor:
        flat, _ = self.concatenation([part.flat_values for part in parts], 0)
        levels = zip(*(part.nested_row_lengths() for part in parts), strict=True)
        lengths = [self.concatenation(level, 0)[0] for level in levels]
        ragged: Any = tf.RaggedTensor
        return ragged.from_nested_row_lengths(flat, lengths)

    def _sparse(self, parts: Parts) -> tf.SparseTensor:
        rows = self._everyones([part.dense_shape[0] for part in parts])
        begins = [tf.add_n([*rows[:replica], tf.zeros_like(rows[0])]) for replica in self.local]
        moved = []
        for part, begin in zip(parts, begins, strict=True):
            others = tf.zeros_like(part.dense_shape[1:])
            moved.append(part.indices + tf.concat([[begin], others], 0))
        values, _ = self.concatenation([part.values for part in parts], 0)
        indices, _ = self.concatenation(moved, 0)
        shape = tf.concat([[tf.add_n(rows)], parts[0].dense_shape[1:]], 0)
        return tf.SparseTensor(indices, values, shape)
