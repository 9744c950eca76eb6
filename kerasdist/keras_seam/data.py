"""Keras's data adapters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
from keras.src.trainers import data_adapters
from keras.src.trainers.data_adapters import array_slicing

from kerasdist.keras_seam.models import backend_name

get_data_adapter: Any = data_adapters.get_data_adapter
is_torch_dataloader: Any = data_adapters.is_torch_dataloader

PyDataset = keras.utils.PyDataset

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
