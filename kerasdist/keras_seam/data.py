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

from kerasdist.keras_seam.array_rows import is_array_adapter
from kerasdist.keras_seam.models import backend_name
from kerasdist.keras_seam.randomness import global_seed

get_data_adapter: Any = data_adapters.get_data_adapter
is_torch_dataloader: Any = data_adapters.is_torch_dataloader

PyDataset = keras.utils.PyDataset

# What these read, Keras lets TensorFlow prefetch.
_READ_BY_PYTHON = (GeneratorDataAdapter, PyDatasetAdapter)

train_validation_split: Any = array_slicing.train_validation_split


def is_dataset(source: Any) -> bool:
    """Returns whether Keras knows this kind of dataset, generators left out.

    Args:
        source: Anything.
    """
    return (
        isinstance(source, keras.utils.PyDataset)
        or data_adapters.is_tf_dataset(source)
        or data_adapters.is_torch_dataloader(source)
        or data_adapters.is_grain_dataset(source)
    )


def is_array(value: Any) -> bool:
    """Returns whether a value is a NumPy array or a tensor of the backend.

    Args:
        value: Anything.
    """
    return isinstance(value, np.ndarray) or keras.ops.is_tensor(value)


def is_native_dataset(source: Any) -> bool:
    """Returns whether this is a dataset of the framework's that Keras runs on: ``tf.data``.

    Args:
        source: Anything.
    """
    return backend_name() == "tensorflow" and data_adapters.is_tf_dataset(source)


def yields_new_arrays(source: Any) -> bool:
    """Returns whether a framework makes a dataset's batches, each of arrays of its own.

    Args:
        source: Anything.
    """
    return data_adapters.is_tf_dataset(source) or data_adapters.is_torch_dataloader(source)


def copied(leaf: Any) -> Any:
    """Returns a copy of an array or tensor, and anything else as it is.

    Args:
        leaf: A leaf of a structure.
    """
    if isinstance(leaf, np.ndarray):
        return leaf.copy()
    return keras.ops.copy(leaf) if keras.ops.is_tensor(leaf) else leaf


def batches(dataset: Any) -> Iterator[Any]:
    """Yields a dataset's batches once, of NumPy arrays, with the workers that the dataset has.

    Args:
        dataset: What `is_dataset` knows.
    """
    adapter = get_data_adapter(dataset)
    adapter.on_epoch_begin()
    try:
        yield from adapter.get_numpy_iterator()
    finally:
        adapter.on_epoch_end()


def spec_of_rows(leaf: Any) -> Any:
    """Returns the type and shape of a batch's array, of any number of rows; anything else as it is.

    Args:
        leaf: An array or tensor, or something that is none.
    """
    if len(getattr(leaf, "shape", ())) == 0:
        return leaf
    dtype = keras.backend.standardize_dtype(leaf.dtype)
    return keras.KerasTensor((None, *leaf.shape[1:]), dtype)


def shuffles_without_seed(adapter: Any) -> bool:
    """Returns whether nothing says in which order an adapter of arrays shuffles them.

    On JAX and PyTorch generators say it whose states can be had; on TensorFlow the seed alone.

    Args:
        adapter: A data adapter.
    """
    if backend_name() != "tensorflow" or not is_array_adapter(adapter):
        return False
    return bool(adapter._shuffle) and global_seed() is None


def reads_aside(adapter: Any) -> bool:
    """Returns whether Keras lets another thread read the data ahead, by Python's code.

    Args:
        adapter: A data adapter.
    """
    return backend_name() == "tensorflow" and isinstance(adapter, _READ_BY_PYTHON)
