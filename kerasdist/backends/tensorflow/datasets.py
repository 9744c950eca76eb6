"""``tf.data`` datasets, which ``tf.distribute`` distributes by itself."""

from __future__ import annotations

import functools
import types
from collections.abc import Sequence
from functools import cache
from typing import Any

import tensorflow as tf

from kerasdist.backends.tensorflow import batches
from kerasdist.backends.tensorflow.data_seam import keeping_input_devices
from kerasdist.backends.tensorflow.groups import Group
from kerasdist.errors import UnsupportedError
from kerasdist.input.distributed import DistributedDataset, equivalent
from kerasdist.input.options import InputOptions, InputReplicationMode


def register() -> None:
    """Lets ``isinstance`` take the framework's distributed datasets for kerasdist's."""
    DistributedDataset.register(tf.distribute.DistributedDataset)


def distribute(group: Group, dataset: Any, options: InputOptions) -> Any | None:
    """Returns a dataset of global batches distributed, or None if it is not of ``tf.data``.

    Args:
        group: The replicas.
        dataset: Anything.
        options: How to distribute it.

    Raises:
        UnsupportedError: If the options ask for a pipeline a replica.
    """
    if not isinstance(dataset, tf.data.Dataset):
        return None
    if options.experimental_replication_mode is InputReplicationMode.PER_REPLICA:
        raise UnsupportedError(
            "Expected InputReplicationMode.PER_WORKER: one dataset has one pipeline. Received: "
            f"options={options}. Use strategy.distribute_datasets_from_function."
        )
    return _sized(group.distributed(dataset, _native_options(options)))


def distribute_own(
    engine: tf.distribute.Strategy, dataset: Any, pieces: int, options: InputOptions
) -> Any | None:
    """Returns a dataset of a worker's own batches in pieces, or None if it is not of ``tf.data``.

    Args:
        engine: The strategy.
        dataset: What this worker reads.
        pieces: In how many each batch is cut; a step takes one for each replica here.
        options: How to distribute it.
    """
    if not isinstance(dataset, tf.data.Dataset):
        return None
    return distribute_pipelines(engine, [_in_pieces(dataset, pieces)], options)


def distribute_pipelines(
    engine: tf.distribute.Strategy, pipelines: Sequence[Any], options: InputOptions
) -> Any | None:
    """Returns a dataset of replicas' batches, or None if they are not all of ``tf.data``.

    Args:
        engine: The strategy.
        pipelines: One for all replicas of this process, or one each.
        options: How to distribute them.
    """
    if not all(isinstance(pipeline, tf.data.Dataset) for pipeline in pipelines):
        return None
    # The framework asks for one after another, by numbers of all workers' pipelines.
    remaining = iter(pipelines)
    with keeping_input_devices(engine):
        return _sized(
            engine.distribute_datasets_from_function(
                lambda _: next(remaining), _native_options(options)
            )
        )


def _in_pieces(dataset: tf.data.Dataset, count: int) -> tf.data.Dataset:
    """Cuts each batch in pieces, one after another."""
    # tf.data calls with the members of a tuple, and with anything else as it is.
    is_tuple = type(dataset.element_spec) is tuple

    def in_pieces(*batch: Any) -> tf.data.Dataset:
        cut = batches.pieces(batch if is_tuple else batch[0], count, stand_ins=False)
        each = [tf.data.Dataset.from_tensors(piece.data) for piece in cut]
        return functools.reduce(tf.data.Dataset.concatenate, each)

    return dataset.flat_map(in_pieces)


def _sized(dataset: Any) -> Any:
    """Lets a distributed dataset tell its length, which one of ``tf.distribute`` cannot.

    It takes a subclass for that: to change the class would change what a user has from
    ``tf.distribute`` itself, too.
    """
    dataset.__class__ = _sized_class(type(dataset))
    return dataset


@cache
def _sized_class(own: type[Any]) -> type[Any]:
    def describe(body: dict[str, Any]) -> None:
        body.update(__module__=own.__module__, __qualname__=own.__qualname__, __doc__=own.__doc__)
        body["__len__"] = lambda dataset: len(equivalent(dataset))
        body["__bool__"] = lambda _: True  # as of a `tf.data.Dataset`, however long it is

    return types.new_class(own.__name__, (own,), exec_body=describe)


def _native_options(options: InputOptions) -> tf.distribute.InputOptions:
    mode = options.experimental_replication_mode
    each = mode is InputReplicationMode.PER_REPLICA
    return tf.distribute.InputOptions(
        # With a pipeline a replica TensorFlow takes this for the dataset's own device.
        experimental_fetch_to_device=options.experimental_fetch_to_device,
        experimental_replication_mode=(
            tf.distribute.InputReplicationMode.PER_REPLICA
            if each
            else tf.distribute.InputReplicationMode.PER_WORKER
        ),
        experimental_place_dataset_on_device=options.experimental_place_dataset_on_device,
        experimental_per_replica_buffer_size=options.experimental_per_replica_buffer_size,
    )
