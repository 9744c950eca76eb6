"""Keras's data adapters, and the ``tf.data`` pipelines that it takes on every backend."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, final

import keras
import numpy as np
from keras.src.trainers import data_adapters
from keras.src.trainers.data_adapters import array_slicing
from keras.src.trainers.data_adapters import data_adapter_utils as utils
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from keras.src.trainers.data_adapters.generator_data_adapter import GeneratorDataAdapter
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter
from keras.src.utils.module_utils import tensorflow as tf

from kerasdist.core.structures import map_leaves
from kerasdist.keras_compat.models import backend_name
from kerasdist.keras_compat.thread_state import global_seed

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


def reads_past_epochs(adapter: Any) -> bool:
    """Returns whether an epoch begins with batches that threads have read before it, of other rows.

    What a PyDataset's threads have made as an epoch ends, Keras gives to the next one (3.15.1).
    """
    if getattr(adapter, "enqueuer", None) is None:
        return False
    kind, events = type(adapter.py_dataset), ("on_epoch_begin", "on_epoch_end")
    changes = any(getattr(kind, event) is not getattr(PyDataset, event) for event in events)
    return bool(adapter.shuffle) or changes


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


# A worker reads only its own rows of each batch from Keras's adapter of arrays. Keras shuffles in a
# different way on each framework. So a second Keras adapter, over the row numbers and with the same
# batch size and shuffle, yields these numbers in the order in which the first one would yield the
# rows.

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
    own: Any = _Numbers(adapter)
    for numbers in own.get_jax_iterator():
        yield taken(chosen(numbers)), len(numbers)


def torch_rows(adapter: object, chosen: Chosen) -> Iterator[tuple[Any, int]]:
    """Returns the chosen rows of each batch, as tensors, and the size of the whole batch."""

    def tensor(kind: Any, rows: Any) -> Any:
        return keras.ops.convert_to_tensor(kind.convert_to_torch_compatible(rows))

    taken = _taker(adapter, "torch", tensor)
    loader: Any = _Numbers(adapter).get_torch_dataloader()
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

    pairs = tf.data.Dataset.zip((_Numbers(adapter).get_tf_dataset(), data))
    return pairs.map(element, num_parallel_calls=tf.data.AUTOTUNE).with_options(options)


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
