"""Keras's data adapters, and ``tf.data`` pipelines, which Keras accepts on every backend."""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeGuard, final

import keras
import numpy as np

from kerasdist.core.internals import with_base
from kerasdist.core.structures import map_leaves
from kerasdist.keras_compat import internals
from kerasdist.keras_compat.models import backend_name
from kerasdist.keras_compat.thread_state import global_seed

PyDataset = keras.utils.PyDataset
unpack_x_y_sample_weight: Any = keras.utils.unpack_x_y_sample_weight

# Parts of the messages with which TensorFlow refuses to shard a dataset by files.
_NO_FILES, _FEW_FILES = "unshardable source dataset", "Could not apply FILE based sharding"


@functools.cache
def _base_of_adapters() -> type:
    """Returns the class from which all data adapters of Keras derive."""
    return type(internals.GET_DATA_ADAPTER.value(np.zeros((1, 1)))).__mro__[-2]


def _make_adapter(kind: type, *_: object, **__: object) -> Any:
    """Makes an adapter whose class derives from `kind` and from the base of Keras's adapters."""
    return object.__new__(with_base(kind, _base_of_adapters()))


class DataAdapter:
    """A base class for kerasdist's own data adapters, so that Keras accepts them as adapters."""

    __new__: Any = _make_adapter


def is_data_adapter(source: object) -> TypeGuard[Any]:
    """Returns whether this is a data adapter of Keras, or of another class that Keras accepts."""
    return isinstance(source, _base_of_adapters())


# The attribute of an adapter of Keras in which kerasdist notes the arguments of `get_data_adapter`.
_GIVEN = "_kerasdist_given"


@final
@dataclass(frozen=True)
class _Given:
    source: Any
    shuffle: bool | str


def get_data_adapter(x: Any, y: Any = None, **arguments: Any) -> Any:
    """Returns Keras's data adapter for the source `x`; if `x` is an adapter, returns `x` itself."""
    adapter = internals.GET_DATA_ADAPTER.value(x, y, **arguments)
    if adapter is not x:
        setattr(adapter, _GIVEN, _Given(x, arguments.get("shuffle", False)))
    return adapter


def _given(adapter: object) -> _Given:
    return getattr(adapter, _GIVEN, _Given(adapter, shuffle=False))


def source_given(adapter: object) -> Any:
    """Returns the source from which Keras made an adapter; returns a user's own adapter itself."""
    return _given(adapter).source


def is_any_of(value: object, module: str, *names: str) -> bool:
    """Returns whether a value is an instance of a class with one of these names in a module.

    Returns False if the module is not loaded, because then no such instance can exist.
    """
    loaded = sys.modules.get(module)
    if loaded is None:
        return False
    for name in names:
        # The class is missing if the module is still being imported, or is of another version.
        with contextlib.suppress(AttributeError):
            if isinstance(value, operator.attrgetter(name)(loaded)):
                return True
    return False


def is_tf_dataset(source: object) -> bool:
    """Returns whether this is a ``tf.data`` dataset, or a dataset made by ``tf.distribute``."""
    return is_any_of(source, "tensorflow", "data.Dataset", "distribute.DistributedDataset")


def is_torch_dataloader(source: object) -> bool:
    """Returns whether this is a ``DataLoader`` of PyTorch."""
    return is_any_of(source, "torch.utils.data", "DataLoader")


def is_grain_dataset(source: object) -> bool:
    """Returns whether this is a dataset or loader of Grain."""
    return is_any_of(source, "grain", "MapDataset", "IterDataset", "DataLoader")


def is_dataset(source: object) -> bool:
    """Returns whether Keras treats this as a dataset; generators do not count."""
    return (
        isinstance(source, keras.utils.PyDataset)
        or is_tf_dataset(source)
        or is_torch_dataloader(source)
        or is_grain_dataset(source)
    )


def has_threads(source: object) -> bool:
    """Returns whether several threads or processes make a source's batches at the same time."""
    return isinstance(source, PyDataset) and source.workers > 1


def is_array(value: object) -> bool:
    """Returns whether a value is a NumPy array or a tensor of the backend."""
    return isinstance(value, np.ndarray) or keras.ops.is_tensor(value)


def is_native_dataset(source: object) -> bool:
    """Returns whether this is a ``tf.data`` dataset, and Keras runs on TensorFlow."""
    return backend_name() == "tensorflow" and is_tf_dataset(source)


def copied(leaf: object) -> Any:
    """Returns a copy of an array or tensor; anything else is returned as it is."""
    if isinstance(leaf, np.ndarray):
        return leaf.copy()
    return keras.ops.copy(leaf) if keras.ops.is_tensor(leaf) else leaf


def batches(dataset: object) -> Iterator[Any]:
    """Yields the batches of one epoch of a dataset, as NumPy arrays."""
    adapter = get_data_adapter(dataset)
    adapter.on_epoch_begin()
    try:
        yield from adapter.get_numpy_iterator()
    finally:
        adapter.on_epoch_end()


def spec_of_rows(leaf: Any) -> Any:
    """Returns a KerasTensor with an array's type and shape, and None as the number of rows.

    Scalars and objects without a shape have no rows, and are returned as they are.
    """
    if len(getattr(leaf, "shape", ())) == 0:
        return leaf
    dtype = keras.backend.standardize_dtype(leaf.dtype)
    return keras.KerasTensor((None, *leaf.shape[1:]), dtype)


def shuffles_without_seed(adapter: Any) -> bool:
    """Returns whether an adapter of arrays shuffles in an order that cannot be repeated.

    On JAX and PyTorch the order depends on the states of random generators, which can be saved. On
    TensorFlow only a seed makes the order repeatable. From Keras 3.16 on the order depends on the
    number of epochs, on every backend.
    """
    if backend_name() != "tensorflow" or not is_array_adapter(adapter) or _orders_by_epoch():
        return False
    return bool(_given(adapter).shuffle) and global_seed() is None


def reads_past_epochs(adapter: Any) -> bool:
    """Returns whether an epoch may begin with batches that threads made for the epoch before it.

    At an epoch's end, a PyDataset's threads may have made batches that are not used yet. Keras
    3.15.1 passes these to the next epoch, although shuffling or `on_epoch_end` changes the rows.
    """
    given = _given(adapter)
    source = given.source
    if not isinstance(source, PyDataset):
        return False
    if source.workers <= 1 and not (source.workers and source.use_multiprocessing):
        return False
    events = ("on_epoch_begin", "on_epoch_end")
    changes = any(getattr(type(source), one) is not getattr(PyDataset, one) for one in events)
    return bool(given.shuffle) or changes


def _orders_by_epoch() -> bool:
    """Returns whether this Keras shuffles each epoch by its number, as Keras does from 3.16 on."""
    return internals.EPOCHS_READ.is_there() or internals.EPOCHS_READ.is_gone()


def epochs_read(adapter: object) -> int | None:
    """Returns how many epochs an adapter has read; None if this Keras does not count them."""
    given = _given(adapter)
    is_ordered = is_array_adapter(adapter) or isinstance(given.source, PyDataset)
    if given.shuffle and is_ordered and _orders_by_epoch():
        return internals.EPOCHS_READ.of(adapter)
    return getattr(adapter, internals.EPOCHS_READ.attribute, None)


def set_epochs_read(adapter: Any, epochs: int | None) -> None:
    """Lets an adapter continue as if it had read this many epochs."""
    if epochs is not None:
        setattr(adapter, internals.EPOCHS_READ.attribute, epochs)


def reads_aside(adapter: object) -> bool:
    """Returns whether TensorFlow prefetches batches by running Python code in another thread."""
    if backend_name() != "tensorflow":
        return False
    source = _given(adapter).source  # TensorFlow prefetches only from the kinds below
    return isinstance(source, PyDataset) or inspect.isgenerator(source)


def leave_accelerators() -> None:
    """Keeps TensorFlow off GPUs and TPUs if it only reads data for another framework.

    The first ``tf.data`` pipeline starts TensorFlow, which would then take nearly all memory of the
    accelerators. Nothing is changed if the user has configured TensorFlow, or if TensorFlow has
    already started.
    """
    if backend_name() == "tensorflow":
        return
    # If TensorFlow is imported later, it must take no more GPU memory than it needs.
    os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")
    config = getattr(sys.modules.get("tensorflow"), "config", None)
    if config is None:
        return
    for kind in ("GPU", "TPU"):
        devices = config.list_physical_devices(kind)
        if devices and not _is_configured(config, devices, kind):
            with contextlib.suppress(RuntimeError):  # raised if TensorFlow has already started
                config.set_visible_devices([], kind)


def _is_configured(config: Any, devices: Any, kind: str) -> bool:
    """Returns whether the user has hidden devices from TensorFlow, or limited their memory."""
    return config.get_visible_devices(kind) != devices or any(
        config.experimental.get_memory_growth(one) is not None
        or config.get_logical_device_configuration(one) is not None
        for one in devices
        if kind == "GPU"
    )


def tensorflow_of(dataset: object) -> Any | None:
    """Returns the module `tensorflow` if a dataset is a ``tf.data`` dataset, else None.

    A dataset made by ``tf.distribute`` does not count.
    """
    return sys.modules["tensorflow"] if is_any_of(dataset, "tensorflow", "data.Dataset") else None


def auto_shard_policy(dataset: Any) -> str | None:
    """Returns the auto-shard policy in a ``tf.data`` dataset's options; None for other data."""
    if tensorflow_of(dataset) is None:
        return None
    return dataset.options().experimental_distribute.auto_shard_policy.name


class EqualBatches(NamedTuple):
    """The number and size of a pipeline's batches, if its `element_spec` shows equal batches.

    Attributes:
        rows: How many rows each batch has.
        count: How many batches the pipeline has; None if the pipeline is endless.
        form: The types and shapes of the arrays in a row.
    """

    rows: int
    count: int | None
    form: Sequence[object]


def equal_batches(dataset: Any) -> EqualBatches | None:
    """Returns the number and size of a pipeline's batches; None if the sizes may differ."""
    tf = tensorflow_of(dataset)
    if tf is None:
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
    """Returns two values: a pipeline that reads every `shards`-th file of a dataset, and None.

    If TensorFlow cannot divide the dataset by files, returns None and the reason instead.
    """
    tf = sys.modules["tensorflow"]
    try:
        # `tf.distribute` calls the same operation. No public function of TensorFlow calls it alone.
        variant = tf.raw_ops.AutoShardDataset(
            input_dataset=tf.data.experimental.to_variant(dataset),
            num_workers=shards,
            index=index,
            auto_shard_policy=tf.data.experimental.AutoShardPolicy.FILE.value,
            **internals.FLAT_STRUCTURE.of(dataset),
        )
        own = tf.data.experimental.from_variant(variant, dataset.element_spec)
        next(iter(own), None)  # only a read makes TensorFlow count the files
    except tf.errors.NotFoundError as error:
        if _NO_FILES not in error.message:
            raise
        return None, "it reads no files"
    except tf.errors.InvalidArgumentError as error:
        if _FEW_FILES not in error.message:
            raise
        return None, "it reads fewer files than there are workers"
    return own.with_options(dataset.options()), None


# A worker reads only its own rows of each batch from Keras's adapter of arrays. Which rows a batch
# has depends on how Keras shuffles, which differs between frameworks. So a second adapter of Keras
# is made for an array of the row numbers. The second adapter has the same batch size and shuffle,
# so its batches have the numbers of the rows that are in the first adapter's batches.

# A function that takes the row numbers of a batch, and returns the selected numbers.
Chosen = Callable[[Any], Any]


def is_array_adapter(adapter: object) -> bool:
    """Returns whether this is an adapter of arrays that `get_data_adapter` has made."""
    source = _given(adapter).source
    return source is not adapter and not is_dataset(source) and not inspect.isgenerator(source)


def takes_rows(adapter: Any) -> bool:
    """Returns whether rows can be selected from an adapter's arrays, before batches are made.

    If not, each worker reads global batches and takes its rows from these.
    """
    if not is_array_adapter(adapter):
        return False
    needed = internals.ARRAYS, internals.SLICEABLE, internals.EPOCHS_READ
    return not any(one.is_gone() for one in needed) and not any(map(_is_sparse, _leaves(adapter)))


def _leaves(adapter: object) -> list[Any]:
    leaves = keras.tree.flatten(internals.ARRAYS.of(adapter))
    return [leaf for leaf in leaves if leaf is not None]


def _is_sparse(leaf: object) -> bool:
    return (
        is_any_of(leaf, "tensorflow", "SparseTensor")
        or is_any_of(leaf, "jax.experimental.sparse", "JAXSparse")
        or is_any_of(leaf, "scipy.sparse", "sparray", "spmatrix")
    )


def jax_rows(adapter: object, chosen: Chosen) -> Iterator[tuple[Any, int]]:
    """Yields the selected rows of each batch for JAX, and the size of the whole batch."""
    take_rows = _taker(adapter, "jax", lambda rows: rows)
    for numbers in _numbers(adapter).get_jax_iterator():
        yield take_rows(chosen(numbers)), len(numbers)


def torch_rows(adapter: object, chosen: Chosen) -> Iterator[tuple[Any, int]]:
    """Returns the selected rows of each batch, as tensors, and the size of the whole batch."""
    take_rows = _taker(adapter, "torch", keras.ops.convert_to_tensor)
    every: Any = _numbers(adapter)
    loader = every.get_torch_dataloader()
    # Starting an iteration draws a random number, even if no batch is read afterwards, and Keras
    # starts some iterations without reading a batch. To draw as many numbers as Keras does, the
    # iteration starts now, and not when the first batch is read.
    iter(loader)

    def batches() -> Iterator[tuple[Any, int]]:
        # The number of epochs is set only now, because Keras chooses an epoch's order when the
        # first batch is read.
        set_epochs_read(every, epochs_read(adapter))
        # The numbers are read from the sampler, which yields them as a list. The loader would turn
        # the list into a tensor, and Keras would turn the tensor into a list again.
        for numbers in loader.batch_sampler:
            yield take_rows(np.asarray(chosen(numbers))), len(numbers)

    return batches()


def tensorflow_rows(adapter: Any, chosen: Chosen, made: Callable[[Any, Any], Any]) -> Any:
    """Returns a dataset with ``made(selected rows, numbers of all rows)`` for each batch."""
    tf = sys.modules["tensorflow"]
    arrays = internals.SLICEABLE.value(internals.ARRAYS.of(adapter), target_backend="tensorflow")
    data = tf.data.Dataset.from_tensors(keras.tree.lists_to_tuples(arrays)).repeat()
    options = tf.data.Options()
    # Keras sets this option too, because TensorFlow would serialize the arrays otherwise.
    options.experimental_optimization.apply_default_optimizations = False
    if _given(adapter).shuffle:
        options.experimental_external_state_policy = tf.data.experimental.ExternalStatePolicy.IGNORE

    def element(numbers: object, data: object) -> Any:
        wanted = chosen(numbers)

        def rows(leaf: object) -> Any:
            if isinstance(leaf, list | tuple | dict):
                return None  # this makes `traverse` continue with the container's members
            return tf.gather(leaf, wanted, axis=0) if tf.is_tensor(leaf) else leaf

        return made(keras.tree.traverse(rows, data), numbers)

    pairs = tf.data.Dataset.zip((_numbers(adapter).get_tf_dataset(), data))
    return pairs.map(element, num_parallel_calls=tf.data.AUTOTUNE).with_options(options)


def _numbers(adapter: Any) -> Any:
    """Returns an adapter that yields row numbers, in the order in which `adapter` yields rows."""
    numbers = get_data_adapter(
        np.arange(_leaves(adapter)[0].shape[0]),
        batch_size=adapter.batch_size,
        shuffle=_given(adapter).shuffle,
    )
    set_epochs_read(numbers, epochs_read(adapter))
    return numbers


def _taker(adapter: Any, framework: str, finish: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns a function that gets row numbers, and returns these rows of the adapter's arrays.

    The rows have the form that the framework's steps take.
    """
    sliceables = internals.SLICEABLE.value(internals.ARRAYS.of(adapter), target_backend=framework)

    def take_rows(numbers: object) -> Any:
        def rows(sliceable: Any) -> Any:
            if sliceable is None:
                return None
            convert = getattr(sliceable, f"convert_to_{framework}_compatible")
            return finish(convert(sliceable[numbers]))

        return map_leaves(rows, sliceables)

    return take_rows
