"""Shards and reads ``tf.data`` pipelines, which Keras takes on every backend."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

from keras.src.trainers import data_adapters
from keras.src.utils.module_utils import tensorflow as tf

from kerasdist.keras_compat.data import batches, is_native_dataset
from kerasdist.keras_compat.models import backend_name

is_tf_dataset: Any = data_adapters.is_tf_dataset

# The words of TensorFlow's error if it cannot shard by files.
_NO_FILES, _FEW_FILES = "unshardable source dataset", "Could not apply FILE based sharding"


def leave_accelerators() -> None:
    """Keeps TensorFlow off GPUs and TPUs where it only reads data, for another framework.

    It would take nearly all of their memory when it starts, which the first ``tf.data`` pipeline
    makes it do. What the user has configured stays, and so does a TensorFlow that has started.
    """
    if backend_name() == "tensorflow":
        return
    # If TensorFlow is imported later, it is to take no more GPU memory than it needs.
    os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")
    config = getattr(sys.modules.get("tensorflow"), "config", None)
    if config is None:
        return
    for kind in ("GPU", "TPU"):
        devices = config.list_physical_devices(kind)
        if devices and not _is_configured(config, devices, kind):
            with contextlib.suppress(RuntimeError):  # TensorFlow has started
                config.set_visible_devices([], kind)


def _is_configured(config: Any, devices: Any, kind: str) -> bool:
    """Returns whether the user has chosen among the devices, or limited their memory."""
    return config.get_visible_devices(kind) != devices or any(
        config.experimental.get_memory_growth(one) is not None
        or config.get_logical_device_configuration(one) is not None
        for one in devices
        if kind == "GPU"
    )


def auto_shard_policy(dataset: Any) -> str | None:
    """Returns the policy in the options of a ``tf.data`` dataset, None for other datasets."""
    if not is_tf_dataset(dataset) or not isinstance(dataset, tf.data.Dataset):
        return None
    return dataset.options().experimental_distribute.auto_shard_policy.name


def every_nth_file(dataset: Any, shards: int, index: int) -> tuple[Any, str | None]:
    """Returns a pipeline over every n-th file, and TensorFlow's reason if it cannot make one."""
    try:
        # `tf.distribute` does the same; there is no public API for it.
        variant = tf.raw_ops.AutoShardDataset(
            input_dataset=tf.data.experimental.to_variant(dataset),
            num_workers=shards,
            index=index,
            auto_shard_policy=tf.data.experimental.AutoShardPolicy.FILE.value,
            **dataset._flat_structure,
        )
        own = tf.data.experimental.from_variant(variant, dataset.element_spec)
        next(iter(own), None)  # only then are the files counted
    except tf.errors.NotFoundError as error:
        if _NO_FILES not in error.message:
            raise
        return None, "it reads no files"
    except tf.errors.InvalidArgumentError as error:
        if _FEW_FILES not in error.message:
            raise
        return None, "it reads fewer files than there are workers"
    return own.with_options(dataset.options()), None


def own_batches(dataset: Any) -> Iterator[Any]:
    """Yields a dataset's batches once: tensors of a framework's own dataset, else NumPy arrays."""
    return iter(dataset) if is_native_dataset(dataset) else batches(dataset)
