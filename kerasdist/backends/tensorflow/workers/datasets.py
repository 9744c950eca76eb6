"""Datasets of global batches for Keras's loops, and of local batches for custom loops."""

from __future__ import annotations

import types
from collections.abc import Sequence
from functools import cache, partial
from typing import Any, final

import tensorflow as tf

from kerasdist.backends.tensorflow.private.prefetching import in_local_batches
from kerasdist.backends.tensorflow.private.strategies import keeping_input_devices, keeps_one_copy
from kerasdist.backends.tensorflow.workers.group import (
    Begin,
    GlobalBatchDataset,
    Group,
    read_alike,
    rows_of_replicas,
)
from kerasdist.input.autoshard import WorkerBatches
from kerasdist.input.distributed import (
    DistributedDataset,
    DistributedIterator,
    DividedDataset,
    GatheredDataset,
    ShardedDataset,
    equivalent,
)
from kerasdist.input.fit_adapter import WrappedAdapter
from kerasdist.input.options import InputOptions


@final
class TensorFlowAdapter(WrappedAdapter):
    """A Keras data adapter for TensorFlow; a `Group` divides its batches over the replicas."""

    def __init__(self, inner: Any, group: Group | None = None) -> None:
        """Stores Keras's own adapter; without a group, its batches are yielded undivided."""
        super().__init__(inner)
        self._group = group

    def get_tf_dataset(self, begin: Begin | None = None) -> Any:
        """Returns the dataset over which Keras's loop iterates.

        If `begin` is given, each iterator is the result of ``begin(iterate)``, so that backups can
        save the iterator. `iterate` is the function that makes the iterator without `begin`.
        """
        if self._group is not None:
            return self._group.batches(self._inner, begin)
        dataset = self._inner.get_tf_dataset()
        if begin is None:
            return dataset
        dataset = read_alike(dataset)
        return GlobalBatchDataset(partial(iter, dataset), dataset.element_spec, begin)


DistributedDataset.register(tf.distribute.DistributedDataset)
DistributedIterator.register(tf.distribute.DistributedIterator)


def native_dataset(group: Group, ours: DistributedDataset) -> Any | None:
    """Returns the equivalent ``tf.distribute`` dataset; None if the source is not ``tf.data``."""
    match ours:
        case DividedDataset(source=tf.data.Dataset() as dataset) if not _has_scalars(dataset):
            options = _native_options(ours.options, group.native_strategy)
            return _with_length(group.distributed(dataset, options))
        case ShardedDataset(source=WorkerBatches(source=own)):
            if isinstance(own.dataset, tf.data.Dataset):
                count = own.steps_a_batch * len(group.local)
                pipeline = in_local_batches(
                    own.dataset, lambda batch: rows_of_replicas(batch, count, range(count))
                )
                return _of_pipelines(group.native_strategy, [pipeline], ours.options)
        case GatheredDataset(source=pipelines):
            is_one = len(pipelines) == 1 or not keeps_one_copy(group.native_strategy)
            if is_one and all(isinstance(one, tf.data.Dataset) for one in pipelines):
                return _of_pipelines(group.native_strategy, pipelines, ours.options)
    return None


def _has_scalars(dataset: tf.data.Dataset) -> bool:
    """Returns whether a batch contains scalars; TensorFlow would try to count their rows."""
    return any(one.shape.rank == 0 for one in tf.nest.flatten(dataset.element_spec))


def _of_pipelines(
    native_strategy: tf.distribute.Strategy, pipelines: Sequence[Any], options: InputOptions
) -> Any:
    """Returns a distributed dataset over pipelines of local batches.

    Each replica of this worker has a pipeline of its own, or all replicas share one pipeline.
    """
    # TensorFlow calls the function once per pipeline of this worker, in the pipelines' order.
    remaining = iter(pipelines)
    with keeping_input_devices(native_strategy):
        dataset = native_strategy.distribute_datasets_from_function(
            lambda _: next(remaining), _native_options(options, native_strategy)
        )
    return _with_length(dataset)


def _with_length(dataset: object) -> Any:
    """Adds ``len`` to a ``tf.distribute`` dataset.

    The object gets a subclass of its class, because a change of the class itself would also affect
    datasets that users get from ``tf.distribute`` directly.
    """
    dataset.__class__ = _sized_class(type(dataset))
    return dataset


@cache
def _sized_class(own: type[Any]) -> type[Any]:
    def describe(body: dict[str, Any]) -> None:
        body.update(__module__=own.__module__, __qualname__=own.__qualname__, __doc__=own.__doc__)
        body["__len__"] = lambda dataset: len(equivalent(dataset))
        body["__bool__"] = lambda _: True  # an empty dataset is also true, as for `tf.data`

    return types.new_class(own.__name__, (own,), exec_body=describe)


def _native_options(
    options: InputOptions, native_strategy: tf.distribute.Strategy
) -> tf.distribute.InputOptions | None:
    """Converts options to a ``tf.distribute.InputOptions``; returns None for central storage."""
    if keeps_one_copy(native_strategy):  # with options, TensorFlow 2.21 reads a misspelt field
        return None
    fields = {name: getattr(options, name) for name in tf.distribute.InputOptions._fields}
    mode = tf.distribute.InputReplicationMode[options.experimental_replication_mode.name]
    # With PER_REPLICA, TensorFlow itself refuses to combine `experimental_fetch_to_device` and
    # `experimental_place_dataset_on_device`.
    return tf.distribute.InputOptions(**fields | {"experimental_replication_mode": mode})
