"""What a worker reads by itself, so that it does not see the other workers' rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, final

import keras
import tensorflow as tf

from kerasdist import keras_seam
from kerasdist.backends.tensorflow.batches import OwnRows, own_numbers
from kerasdist.backends.tensorflow.groups import Group
from kerasdist.backends.tensorflow.pipelines import GlobalBatchDataset
from kerasdist.backends.tensorflow.values import tensor_of_array
from kerasdist.input.adapter import WrappedAdapter
from kerasdist.input.sharded import ShardedAdapter, WorkerBatches


@final
class WorkerAdapter(WrappedAdapter):
    """Yields a worker's rows of each batch, and of arrays does not read the others."""

    def __init__(self, inner: Any, group: Group) -> None:
        """Wraps an adapter.

        Args:
            inner: The adapter that Keras made for the data of the call, or that of own batches.
            group: The replicas.
        """
        super().__init__(inner)
        self._group = group

    def get_tf_dataset(self) -> Any:
        """Returns the batches, as the group takes them."""
        if isinstance(self._inner, ShardedAdapter):
            batches = self._inner.batches
            return GlobalBatchDataset(_OwnBatches(batches), _spec(batches))
        if not keras_seam.is_array_adapter(self._inner):
            return self._group.batches(self._inner.get_tf_dataset())
        replicas, own = self._group.engine.num_replicas_in_sync, self._group.local
        dataset = keras_seam.tensorflow_rows(
            self._inner,
            lambda numbers: own_numbers(numbers, replicas, own)[0],
            lambda rows, numbers: OwnRows(
                rows, own_numbers(numbers, replicas, own)[1], tf.shape(numbers)[0]
            ),
        ).prefetch(tf.data.AUTOTUNE)
        return GlobalBatchDataset.of_arrays(dataset, dataset.element_spec.rows)


@final
class _OwnBatches:
    """A worker's own batches as steps take them, with the sizes that the workers agreed on."""

    def __init__(self, batches: WorkerBatches) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[OwnRows]:
        for own in self._batches:
            rows = keras.tree.map_structure(tensor_of_array, own.rows if own.size else own.like)
            yield OwnRows(rows, tf.constant(own.size), tf.constant(own.total))


def _spec(batches: WorkerBatches) -> Any:
    """The types and shapes of a batch."""
    dataset = batches.source.dataset
    if isinstance(dataset, tf.data.Dataset):
        return dataset.element_spec
    return keras.tree.map_structure(_spec_of, batches.form())


def _spec_of(leaf: Any) -> Any:
    leaf = tensor_of_array(leaf)
    if leaf is None or leaf.shape.rank == 0:
        return leaf
    return tf.TensorSpec([None, *leaf.shape[1:]], leaf.dtype)
