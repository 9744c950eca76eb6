"""Reads only chosen rows of each batch from Keras's adapter of arrays.

Keras shuffles in a different way on each framework. So a second Keras adapter, over the row numbers
and with the same batch size and shuffle, yields these numbers in the order in which the first one
would yield the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, final

import keras
import numpy as np
from keras.src.trainers.data_adapters import array_slicing
from keras.src.trainers.data_adapters import data_adapter_utils as utils
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from keras.src.utils.module_utils import tensorflow as tf

from kerasdist.core.structures import map_leaves

# Takes the row numbers of a batch, returns the selected ones.
Chosen = Callable[[Any], Any]


def is_array_adapter(adapter: object) -> bool:
    """Returns whether this is Keras's adapter of arrays."""
    return isinstance(adapter, ArrayDataAdapter)


def has_sparse(adapter: Any) -> bool:
    """Returns whether some of the arrays are sparse."""
    kinds = utils.is_jax_sparse, utils.is_scipy_sparse, utils.is_tensorflow_sparse
    leaves = keras.tree.flatten(adapter._inputs)
    return any(kind(leaf) for leaf in leaves if leaf is not None for kind in kinds)


def jax_rows(adapter: object, chosen: Chosen) -> Iterator[tuple[Any, int]]:
    """Yields the chosen rows of each batch, as arrays for JAX, and the size of the whole batch."""
    taken = _taker(
        adapter, "jax", lambda sliceable, rows: sliceable.convert_to_jax_compatible(rows)
    )
    for numbers in _numbers(adapter).get_jax_iterator():
        yield taken(chosen(numbers)), len(numbers)


def torch_rows(adapter: object, chosen: Chosen) -> Iterator[tuple[Any, int]]:
    """Returns the chosen rows of each batch, as tensors, and the size of the whole batch."""

    def tensor(kind: Any, rows: Any) -> Any:
        return keras.ops.convert_to_tensor(kind.convert_to_torch_compatible(rows))

    taken = _taker(adapter, "torch", tensor)
    loader = _numbers(adapter).get_torch_dataloader()
    # Here, not with the first batch: a loader draws a random number when an iteration starts, and
    # Keras starts iterations from which it reads nothing.
    iter(loader)
    # The loader itself would turn the numbers into a tensor, which would be made a list again.
    every = iter(loader.batch_sampler)
    return ((taken(np.asarray(chosen(numbers))), len(numbers)) for numbers in every)


def tensorflow_rows(adapter: Any, chosen: Chosen, made: Callable[[Any, Any], Any]) -> Any:
    """Returns a dataset of ``made(rows, numbers)``, of a batch's chosen rows and row numbers."""
    arrays = array_slicing.convert_to_sliceable(adapter._inputs, target_backend="tensorflow")
    data = tf.data.Dataset.from_tensors(keras.tree.lists_to_tuples(arrays)).repeat()
    options = tf.data.Options()
    # Keras sets this too: otherwise TensorFlow would serialize the arrays.
    options.experimental_optimization.apply_default_optimizations = False
    if adapter._shuffle:
        options.experimental_external_state_policy = tf.data.experimental.ExternalStatePolicy.IGNORE

    def element(numbers: object, data: object) -> Any:
        wanted = chosen(numbers)

        def rows(leaf: object) -> Any:
            if isinstance(leaf, array_slicing.TensorflowSparseWrapper):
                return array_slicing.slice_tensorflow_sparse_wrapper(leaf, wanted)
            if isinstance(leaf, list | tuple | dict):
                return None  # `traverse` goes on to the container's members
            return tf.gather(leaf, wanted, axis=0) if tf.is_tensor(leaf) else leaf

        return made(keras.tree.traverse(rows, data), numbers)

    pairs = tf.data.Dataset.zip((_numbers(adapter).get_tf_dataset(), data))
    return pairs.map(element, num_parallel_calls=tf.data.AUTOTUNE).with_options(options)


def _numbers(adapter: object) -> Any:
    return _Numbers(adapter)


@final
class _Numbers(ArrayDataAdapter):
    """An adapter of the row numbers, in the order of another adapter's rows."""

    def __init__(self, adapter: Any) -> None:
        super().__init__(
            np.arange(adapter._num_samples),
            batch_size=adapter._batch_size,
            shuffle=adapter._shuffle,
        )
        self._adapter = adapter

    @property
    def _epoch(self) -> int:
        """The order depends on it from Keras 3.16 on, and the other adapter counts."""
        return self._adapter._epoch

    @_epoch.setter
    def _epoch(self, value: int) -> None:
        """Drops Keras's own count, which begins at zero."""


def _taker(
    adapter: Any, framework: str, converted: Callable[[Any, Any], Any]
) -> Callable[[Any], Any]:
    sliceables = array_slicing.convert_to_sliceable(adapter._inputs, target_backend=framework)

    def taken(numbers: object) -> Any:
        def rows(sliceable: Any) -> Any:
            return None if sliceable is None else converted(sliceable, sliceable[numbers])

        return map_leaves(rows, sliceables)

    return taken
