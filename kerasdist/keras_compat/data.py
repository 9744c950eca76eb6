"""Keras's data adapters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
from keras.src.trainers import data_adapters
from keras.src.trainers.data_adapters import array_slicing
from keras.src.trainers.data_adapters.generator_data_adapter import GeneratorDataAdapter
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter

from kerasdist.keras_compat.array_rows import is_array_adapter
from kerasdist.keras_compat.models import backend_name
from kerasdist.keras_compat.settings import global_seed

get_data_adapter: Any = data_adapters.get_data_adapter
is_torch_dataloader: Any = data_adapters.is_torch_dataloader

PyDataset = keras.utils.PyDataset

# Adapters whose data Keras lets TensorFlow prefetch.
_READ_BY_PYTHON = (GeneratorDataAdapter, PyDatasetAdapter)

train_validation_split: Any = array_slicing.train_validation_split


def is_dataset(source: object) -> bool:
    """Returns whether Keras takes this as a dataset; generators do not count."""
    return (
        isinstance(source, keras.utils.PyDataset)
        or data_adapters.is_tf_dataset(source)
        or data_adapters.is_torch_dataloader(source)
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
    return backend_name() == "tensorflow" and data_adapters.is_tf_dataset(source)


def yields_new_arrays(source: object) -> bool:
    """Returns whether a dataset makes new arrays for each batch."""
    return data_adapters.is_tf_dataset(source) or data_adapters.is_torch_dataloader(source)


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
