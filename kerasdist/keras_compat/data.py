"""Keras's data adapters, and the ``tf.data`` pipelines that it takes on every backend."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
from keras.src.trainers import data_adapters
from keras.src.trainers.data_adapters import array_slicing
from keras.src.trainers.data_adapters.generator_data_adapter import GeneratorDataAdapter
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter
from keras.src.utils.module_utils import tensorflow as tf

from kerasdist.keras_compat.array_rows import is_array_adapter
from kerasdist.keras_compat.models import backend_name
from kerasdist.keras_compat.settings import global_seed

get_data_adapter: Any = data_adapters.get_data_adapter
is_tf_dataset: Any = data_adapters.is_tf_dataset
is_torch_dataloader: Any = data_adapters.is_torch_dataloader

PyDataset = keras.utils.PyDataset

# Adapters whose data Keras lets TensorFlow prefetch.
_READ_BY_PYTHON = (GeneratorDataAdapter, PyDatasetAdapter)

train_validation_split: Any = array_slicing.train_validation_split

# The words of TensorFlow's error if it cannot shard by files.
_NO_FILES, _FEW_FILES = "unshardable source dataset", "Could not apply FILE based sharding"


def is_dataset(source: object) -> bool:
    """Returns whether Keras takes this as a dataset; generators do not count."""
    return (
        isinstance(source, keras.utils.PyDataset)
        or is_tf_dataset(source)
        or is_torch_dataloader(source)
        or data_adapters.is_grain_dataset(source)
    )


def has_threads(source: object) -> bool:
    """Returns whether several threads or processes make a source's batches, in no set order."""
    return isinstance(source, PyDataset) and source.workers > 1


def is_array(value: object) -> bool:
    """Returns whether a value is a NumPy array or a tensor of the backend."""
    return isinstance(value, np.ndarray) or keras.ops.is_tensor(value)


def is_native_dataset(source: object) -> bool:
    """Returns whether this is a ``tf.data`` dataset, and Keras runs on TensorFlow."""
    return backend_name() == "tensorflow" and is_tf_dataset(source)


def yields_new_arrays(source: object) -> bool:
    """Returns whether a dataset makes new arrays for each batch."""
    return is_tf_dataset(source) or is_torch_dataloader(source)


def copied(leaf: object) -> Any:
    """Returns a copy of an array or tensor, and anything else as it is."""
    if isinstance(leaf, np.ndarray):
        return leaf.copy()
    return keras.ops.copy(leaf) if keras.ops.is_tensor(leaf) else leaf


def batches(dataset: object) -> Iterator[Any]:
    """Yields a dataset's batches once, as NumPy arrays, with the dataset's own workers."""
    adapter = get_data_adapter(dataset)
    adapter.on_epoch_begin()
    try:
        yield from adapter.get_numpy_iterator()
    finally:
        adapter.on_epoch_end()


def spec_of_rows(leaf: Any) -> Any:
    """Returns the type and shape of a batch's array without its number of rows."""
    if len(getattr(leaf, "shape", ())) == 0:
        return leaf
    dtype = keras.backend.standardize_dtype(leaf.dtype)
    return keras.KerasTensor((None, *leaf.shape[1:]), dtype)


def shuffles_without_seed(adapter: Any) -> bool:
    """Returns whether an adapter of arrays shuffles in an order that cannot be repeated.

    On JAX and PyTorch the states of generators decide the order, and can be kept; on TensorFlow
    only a seed does.
    """
    if backend_name() != "tensorflow" or not is_array_adapter(adapter):
        return False
    return bool(adapter._shuffle) and global_seed() is None


def epochs_read(adapter: object) -> int | None:
    """Returns by which number of epochs an adapter orders its rows, as from Keras 3.16 on."""
    return getattr(adapter, "_epoch", None)


def set_epochs_read(adapter: Any, epochs: int | None) -> None:
    """Lets an adapter go on as after this many epochs."""
    if epochs is not None:
        adapter._epoch = epochs


def reads_aside(adapter: object) -> bool:
    """Returns whether TensorFlow reads the data ahead by Python code, in another thread."""
    return backend_name() == "tensorflow" and isinstance(adapter, _READ_BY_PYTHON)


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


def _is_pipeline(dataset: object) -> bool:
    """Returns whether a dataset is one of ``tf.data``, and not one that ``tf.distribute`` made."""
    return is_tf_dataset(dataset) and isinstance(dataset, tf.data.Dataset)


def auto_shard_policy(dataset: Any) -> str | None:
    """Returns the policy in the options of a ``tf.data`` dataset, None for other datasets."""
    if not _is_pipeline(dataset):
        return None
    return dataset.options().experimental_distribute.auto_shard_policy.name


class EqualBatches(NamedTuple):
    """What a pipeline's types say of its batches.

    Attributes:
        rows: How many each batch has.
        count: How many batches there are, None if they do not end.
        form: The types and shapes of a row.
    """

    rows: int
    count: int | None
    form: Sequence[object]


def equal_batches(dataset: Any) -> EqualBatches | None:
    """Returns what a pipeline's types say of its batches, None if they are not all alike."""
    if not _is_pipeline(dataset):
        return None
    leaves = [leaf for leaf in tf.nest.flatten(dataset.element_spec) if leaf is not None]
    count = int(dataset.cardinality())
    if count == tf.data.UNKNOWN_CARDINALITY or not all(
        isinstance(leaf, tf.TensorSpec) and leaf.shape.is_fully_defined() for leaf in leaves
    ):
        return None
    shapes = [leaf.shape.as_list() for leaf in leaves]
    sizes = {shape[0] for shape in shapes if shape}
    if len(sizes) != 1:
        return None
    form = [[leaf.dtype.name, *shape[1:]] for leaf, shape in zip(leaves, shapes, strict=True)]
    ends = count != tf.data.INFINITE_CARDINALITY
    return EqualBatches(sizes.pop(), count if ends else None, form)


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
