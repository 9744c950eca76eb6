"""The replicas in sync: which of them are in this process, and how their values come together."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import tensorflow as tf

from kerasdist.backends.collectives import DEFAULT_COMMUNICATION
from kerasdist.backends.tensorflow import gradients
from kerasdist.backends.tensorflow.batches import Piece, pieces
from kerasdist.backends.tensorflow.components import check_alike, concat
from kerasdist.backends.tensorflow.engine_seam import group_key, keeps_one_copy, mirrored
from kerasdist.backends.tensorflow.pipelines import GlobalBatchDataset
from kerasdist.backends.tensorflow.transport import Lanes, Transport
from kerasdist.collectives import CommunicationOptions

# The parts of one value that the replicas of this process hold, by replica.
Parts = Sequence[Any]


class Group(abc.ABC):
    """All replicas of an engine.

    What takes `Parts` is called in cross-replica context, on all workers alike.

    Attributes:
        engine: The framework's strategy that holds them together.
        shares_memory: Whether one replica's tensor costs nothing to read in another one of this
            process.
        runs_loops: Whether a custom loop has run, in which replicas may come to differ.
    """

    def __init__(self, engine: tf.distribute.Strategy, *, shares_memory: bool) -> None:
        """Makes the group.

        Args:
            engine: The framework's strategy.
            shares_memory: Whether the devices of this process share their memory.
        """
        self.engine = engine
        self.shares_memory = shares_memory
        self.runs_loops = False

    def note_loop(self) -> None:
        """Notes that a custom loop runs, in which what replicas hold may come to differ."""
        self.runs_loops = True

    def calling(self) -> AbstractContextManager[None]:
        """Returns a context for a call of `fit`, `evaluate` or `predict`."""
        return nullcontext()

    @property
    @abc.abstractmethod
    def local(self) -> range:
        """The numbers of the replicas in this process."""

    @abc.abstractmethod
    def batches(self, dataset: tf.data.Dataset) -> tf.distribute.DistributedDataset:
        """Returns a dataset of batches as `pieces` takes them.

        Args:
            dataset: Yields global batches.
        """

    @abc.abstractmethod
    def distributed(
        self, dataset: tf.data.Dataset, options: tf.distribute.InputOptions
    ) -> tf.distribute.DistributedDataset:
        """Returns a dataset that yields a distributed value for each global batch.

        Args:
            dataset: Yields global batches.
            options: How to distribute them.
        """

    @abc.abstractmethod
    def pieces(self, batch: Any) -> list[Piece]:
        """Divides a batch for a step of `fit`, `evaluate` or `predict`.

        Args:
            batch: A global batch, or what `batches` yields.

        Returns:
            One piece for each replica of this process, each with at least one row.
        """

    @abc.abstractmethod
    def sums(
        self,
        columns: Sequence[Parts],
        options: CommunicationOptions = DEFAULT_COMMUNICATION,
        *,
        here: bool = True,
    ) -> list[Any]:
        """Returns the sum over all replicas of each of several values.

        Args:
            columns: The parts of each value: tensors, ``tf.IndexedSlices``, or None in all.
            options: How to communicate.
            here: Whether the sums are needed on the first device alone; else, where collectives
                pay, each is a distributed value with a component on every device.
        """

    @abc.abstractmethod
    def sums_of_gradients(
        self, columns: Sequence[Parts], variables: Sequence[Any], *, here: bool
    ) -> list[Any]:
        """Returns the sums of gradients, as `sums`.

        Args:
            columns: The parts of each gradient.
            variables: The Keras variables that they belong to.
            here: Whether something is computed on the sums before they update the variables.
        """

    @abc.abstractmethod
    def concatenation(
        self, parts: Parts, axis: int, *, equal_sizes: bool = False
    ) -> tuple[Any, list[Any]]:
        """Returns tensors of all replicas one after another, and the size of each.

        Args:
            parts: Tensors; also sparse and ragged ones, along axis 0.
            axis: The axis along which they may differ in size.
            equal_sizes: Whether they are known not to, on all workers.
        """

    def largest(self, parts: Parts) -> Any:
        """Returns the elementwise maximum over all replicas, None where there is nothing.

        Args:
            parts: Tensors, or None in all.
        """
        if parts[0] is None:
            return None
        rows, _ = self.concatenation([part[tf.newaxis] for part in parts], 0, equal_sizes=True)
        return tf.reduce_max(rows, 0)

    @property
    @abc.abstractmethod
    def is_divided(self) -> bool:
        """Whether other processes hold a part."""

    def costly(self, variables: Sequence[Any]) -> list[Any]:
        """Returns those variables whose reading would cost a collective.

        Args:
            variables: Keras variables that each replica writes for itself.
        """
        del variables  # all parts are here
        return []

    def wholes(self, variables: Sequence[Any], sums: Sequence[Any]) -> list[tf.Tensor]:
        """Returns what all replicas hold of variables together.

        Args:
            variables: Keras variables that each replica writes for itself.
            sums: The sums of their parts.
        """
        replicas = self.engine.num_replicas_in_sync
        totals = [self.engine.experimental_local_results(total)[0] for total in sums]
        return [
            tf.cast(total / replicas, total.dtype) if one.aggregation == "mean" else total
            for one, total in zip(variables, totals, strict=True)
        ]

    def everyones(self, structures: Sequence[Any]) -> list[Any]:
        """Returns what each replica has.

        Args:
            structures: The same structure of tensors from each replica of this process.

        Returns:
            The structure from each replica of all.
        """
        return list(structures)

    def note_equal(self, variables: Sequence[Any]) -> None:
        """Notes that in `fit` all replicas write the same to variables that are read as the mean.

        Args:
            variables: Keras variables.
        """
        del variables  # all of them are here

    def note(self, variables: Sequence[Any], values: Sequence[tf.Tensor]) -> None:
        """Notes, after a step, what was read in it.

        Args:
            variables: Keras variables.
            values: Their values.
        """
        del variables, values  # reading them costs nothing

    def equalize(self, variables: Sequence[Any]) -> None:
        """Gives variables the chief's values.

        Args:
            variables: Keras variables.
        """
        del variables  # all of them are here

    @abc.abstractmethod
    def average(self, variables: Sequence[Any]) -> None:
        """Gives all replicas the mean of variables that are averaged on reading.

        Args:
            variables: Keras variables.
        """


@final
class LocalGroup(Group):
    """All replicas are in this process."""

    def __init__(self, engine: tf.distribute.Strategy, *, shares_memory: bool) -> None:
        """Makes the group.

        Args:
            engine: The framework's strategy.
            shares_memory: Whether the devices share their memory.
        """
        super().__init__(engine, shares_memory=shares_memory)
        devices = engine.extended.worker_devices
        # A variable that has one copy needs its gradient in one place.
        is_one_place = shares_memory or len(devices) == 1 or keeps_one_copy(engine)
        lanes = Lanes(devices, workers=1, key=group_key())
        self._transport = None if is_one_place else Transport(lanes, lambda: 0.0)

    @property
    def local(self) -> range:
        """The numbers of all replicas."""
        return range(self.engine.num_replicas_in_sync)

    @property
    def is_divided(self) -> bool:
        """No other process holds a part."""
        return False

    def batches(self, dataset: tf.data.Dataset) -> tf.distribute.DistributedDataset:
        """Returns the dataset of global batches."""
        return GlobalBatchDataset(dataset, dataset.element_spec)

    def distributed(
        self, dataset: tf.data.Dataset, options: tf.distribute.InputOptions
    ) -> tf.distribute.DistributedDataset:
        """Returns the engine's own."""
        return self.engine.experimental_distribute_dataset(dataset, options)

    def pieces(self, batch: Any) -> list[Piece]:
        """Divides a global batch."""
        return pieces(batch, len(self.local), stand_ins=True)

    def sums(
        self,
        columns: Sequence[Parts],
        options: CommunicationOptions = DEFAULT_COMMUNICATION,
        *,
        here: bool = True,
    ) -> list[Any]:
        """Returns sums, by collectives where they pay."""
        if here or self._transport is None:
            return [gradients.summed(parts) for parts in columns]
        results: list[Any] = [None] * len(columns)
        dense = [index for index, parts in enumerate(columns) if _travels(parts)]
        given = [[tf.convert_to_tensor(part) for part in columns[index]] for index in dense]
        for index, column in zip(dense, self._transport.sums(given, options), strict=True):
            results[index] = mirrored(column)
        return [
            gradients.summed(parts) if result is None else result
            for parts, result in zip(columns, results, strict=True)
        ]

    def sums_of_gradients(
        self, columns: Sequence[Parts], variables: Sequence[Any], *, here: bool
    ) -> list[Any]:
        """Returns sums, by collectives where they pay."""
        del variables
        return self.sums(columns, here=here)

    def concatenation(
        self, parts: Parts, axis: int, *, equal_sizes: bool = False
    ) -> tuple[Any, list[Any]]:
        """Returns the tensors one after another."""
        del equal_sizes
        check_alike(parts, axis)
        return concat(parts, axis), [_size(part, axis) for part in parts]

    def average(self, variables: Sequence[Any]) -> None:
        """Averages those of which the replicas differ."""
        for variable in variables:
            parts = [part.numpy() for part in variable.value.values]
            if any((part != parts[0]).any() for part in parts[1:]):
                variable.assign(variable.value)


def _travels(parts: Parts) -> bool:
    """Whether a collective reaches the tensors: int32 is on the host, whatever the device."""
    first = next((part for part in parts if part is not None), None)
    if first is None or isinstance(first, tf.IndexedSlices):
        return False
    return first.dtype not in (tf.int32, tf.bool)


def _size(part: Any, axis: int) -> Any:
    return 0 if isinstance(part, tf.SparseTensor | tf.RaggedTensor) else tf.shape(part)[axis]
