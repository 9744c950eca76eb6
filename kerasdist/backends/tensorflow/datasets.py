"""``tf.data`` datasets, which ``tf.distribute`` distributes by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from kerasdist.backends.tensorflow.engine_seam import keeping_input_devices
from kerasdist.errors import UnsupportedError
from kerasdist.input.distributed import DistributedDataset
from kerasdist.input.options import InputOptions, InputReplicationMode


def register() -> None:
    """Lets ``isinstance`` take the framework's distributed datasets for kerasdist's."""
    DistributedDataset.register(tf.distribute.DistributedDataset)


def distribute(engine: tf.distribute.Strategy, dataset: Any, options: InputOptions) -> Any | None:
    """Returns a dataset of global batches distributed, or None if it is not of ``tf.data``.

    Args:
        engine: The strategy.
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
    return engine.experimental_distribute_dataset(dataset, _native_options(options))


def distribute_pipelines(
    engine: tf.distribute.Strategy, pipelines: Sequence[Any], options: InputOptions
) -> Any | None:
    """Returns a dataset of replicas' batches, or None if they are not all of ``tf.data``.

    Args:
        engine: The strategy.
        pipelines: One for all replicas, or one each.
        options: How to distribute them.
    """
    if not all(isinstance(pipeline, tf.data.Dataset) for pipeline in pipelines):
        return None
    with keeping_input_devices(engine):
        return engine.distribute_datasets_from_function(
            lambda here: pipelines[here.input_pipeline_id], _native_options(options)
        )


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
