"""Functions and classes to iterate over the batches of a source, or over every n-th batch.

A source is a dataset, or another object whose elements are batches. `RowDataset` is a source that
is made from arrays.
"""

from __future__ import annotations

import copy
import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, cast, final

import numpy as np

from kerasdist import keras_compat
from kerasdist.core.structures import flatten, map_leaves
from kerasdist.errors import InputError


def batches_of(source: Any) -> Callable[[], Iterator[Any]]:
    """Returns a function that starts an iteration over the batches of a source."""
    if keras_compat.is_dataset(source):
        return lambda: iter(keras_compat.batches(source))
    if _is_of_arrays(source):
        raise InputError(
            "Expected a dataset, or a list of batches. Received: arrays, dataset="
            f"{map_leaves(_shown, source)}, whose elements are no batches. Make a dataset of them: "
            "strategy.experimental_make_numpy_dataset((x, y)).batch(global_batch_size)."
        )
    kind = cast("type[Any]", type(source))
    if issubclass(kind, str | bytes | dict) or not _is_iterable(source):
        raise InputError(
            "Expected a dataset, or something to iterate over whose elements are batches. "
            f"Received: dataset of type {kind.__name__}. Put arrays into a dataset first, or pass "
            "a list of batches; for a function use strategy.distribute_datasets_from_function."
        )
    return lambda: iter(source)


def begin(source: Any) -> Iterator[Any]:
    """Starts an iteration over a source, without the checks of `batches_of`.

    The source may also be a torch sampler, whose elements are indices of examples, not batches.

    Only ``tf.data`` datasets under TensorFlow yield tensors; all other datasets yield NumPy arrays.
    """
    is_read = keras_compat.is_dataset(source) and not keras_compat.is_native_dataset(source)
    return iter(keras_compat.batches(source) if is_read else source)


def length_of(source: Any) -> int | None:
    """Returns the number of batches of a source; None if it is not known."""
    if keras_compat.is_dataset(source):
        return keras_compat.get_data_adapter(source).num_batches
    try:
        return len(source)
    except TypeError:
        return None


def lasting_batches_of(source: object) -> Callable[[], Iterator[Any]]:
    """Does the same as `batches_of`, but copies batches that the source may overwrite.

    A generator may put each batch into the same array, and the next batch may be read before the
    current one is used.
    """
    start = batches_of(source)
    return start if is_lasting(source) else lambda: map(copied, start())


def is_lasting(source: object) -> bool:
    """Returns whether a source keeps a batch's arrays unchanged when it yields the next batch."""
    makes_new = keras_compat.is_tf_dataset(source) or keras_compat.is_torch_dataloader(source)
    return makes_new or isinstance(source, list | tuple)


def copied(batch: object) -> Any:
    """Returns a batch with copies of its arrays and tensors."""
    return map_leaves(keras_compat.copied, batch)


def _is_of_arrays(source: object) -> bool:
    """Returns whether a source is an array, or a tuple that has an array, such as ``(x, y)``."""
    parts = cast("tuple[Any, ...]", source) if isinstance(source, tuple) else (source,)
    return any(map(keras_compat.is_array, parts))


def _shown(leaf: Any) -> str:
    return f"array of shape {tuple(leaf.shape)}" if keras_compat.is_array(leaf) else repr(leaf)[:50]


def _is_iterable(source: Any) -> bool:
    try:
        iter(source)
    except TypeError:
        return False
    return True


@final
class EveryNth:
    """Every n-th element of an object that can only be read in sequence, like a torch sampler."""

    def __init__(self, source: Any, step: int, first: int) -> None:
        self._source, self._step, self._first = source, step, first

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(begin(self._source), self._first, None, self._step)

    def __len__(self) -> int:
        length = length_of(self._source)
        if length is None:
            raise TypeError("the length of the source is not known")
        return len(range(self._first, length, self._step))


@final
class EveryNthBatch(keras_compat.PyDataset):
    """Every n-th batch of a `PyDataset`."""

    def __init__(self, dataset: Any, step: int, first: int) -> None:
        super().__init__(dataset.workers, dataset.use_multiprocessing, dataset.max_queue_size)
        self._dataset = dataset
        self._step, self._first = step, first

    @property
    def num_batches(self) -> int | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The number of the selected batches; None if the dataset is endless."""
        count = self._dataset.num_batches
        return None if count is None else len(range(self._first, count, self._step))

    def __getitem__(self, index: int) -> Any:
        return self._dataset[self._first + index * self._step]

    def on_epoch_begin(self) -> None:
        """Passes the event on to the dataset."""
        self._dataset.on_epoch_begin()

    def on_epoch_end(self) -> None:
        """Passes the event on to the dataset."""
        self._dataset.on_epoch_end()


def every_nth_of_loader(loader: Any, step: int, first: int) -> Any | None:
    """Returns a torch ``DataLoader`` of every n-th batch; None for an ``IterableDataset``."""
    if isinstance(loader.dataset, sys.modules["torch.utils.data"].IterableDataset):
        return None
    own = copy.copy(loader)
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    # A DataLoader refuses to set this attribute after its constructor. `object.__setattr__` sets it
    # all the same, which is safe because nothing iterates over the copy yet.
    object.__setattr__(own, name, EveryNth(getattr(loader, name), step, first))
    # With `persistent_workers`, a DataLoader stores its iterator. The copy must make its own.
    object.__setattr__(own, "_iterator", None)
    return own


def samplers_of(loader: Any) -> list[Any]:
    """Returns the samplers of a ``DataLoader``, each of them once."""
    batches = loader.batch_sampler
    listed = loader.sampler, batches, getattr(batches, "sampler", None)
    return list({id(one): one for one in listed if one is not None}.values())


def tell_epoch(loader: object, epoch: int) -> None:
    """Calls `set_epoch` on those samplers of a ``DataLoader`` that have this method."""
    for sampler in samplers_of(loader):
        if hasattr(sampler, "set_epoch"):  # as `DistributedSampler` has
            sampler.set_epoch(epoch)


@final
@dataclass(frozen=True, eq=False)
class RowDataset:
    """A dataset of the rows of arrays, in order or shuffled, as single rows or as batches.

    The dataset can be iterated repeatedly; shuffled rows come in a different order each time.

    Example::

        rows = strategy.experimental_make_numpy_dataset((x, y))
        dataset = strategy.distribute_dataset(rows.shuffle(seed=0).batch(16))

    Attributes:
        arrays: NumPy arrays with the examples along axis 0, nested in any structure.
        batch_size: Number of rows in an element; None for single rows, without an axis of rows.
        drop_remainder: Whether to leave out a last batch that is smaller.
        shuffled: The generator that draws the order of the rows; None to keep their order.
    """

    arrays: Any
    batch_size: int | None = None
    drop_remainder: bool = False
    shuffled: np.random.Generator | None = None

    def __post_init__(self) -> None:
        shapes = [np.shape(array) for array in flatten(self.arrays)]
        if len({shape[:1] for shape in shapes}) != 1 or not shapes[0]:
            raise InputError(
                "Expected arrays with the same number of rows, one per example. Received: "
                f"numpy_input of shapes {shapes[:10]}. A list counts as a structure of arrays: "
                "convert a list of numbers to an array."
            )

    def shuffle(self, seed: int | None = None) -> RowDataset:
        """Returns the rows in a random order, which is different in each iteration.

        Args:
            seed: The seed of the order; None for a random seed.
        """
        generator = np.random.default_rng(seed)
        return replace(self, shuffled=generator)

    def batch(self, batch_size: int, drop_remainder: bool = False) -> RowDataset:
        """Returns the rows in batches.

        Args:
            batch_size: Number of rows in a batch.
            drop_remainder: Whether to leave out a last batch that is smaller.

        Raises:
            ValueError: If `batch_size` is not positive.
        """
        if batch_size < 1:
            raise ValueError(f"Expected batch_size to be positive. Received: {batch_size=}.")
        return replace(self, batch_size=batch_size, drop_remainder=drop_remainder)

    def __len__(self) -> int:
        """Returns the number of batches; the number of rows if there is no `batch_size`."""
        rows = np.shape(flatten(self.arrays)[0])[0]
        if self.batch_size is None:
            return rows
        return rows // self.batch_size if self.drop_remainder else -(-rows // self.batch_size)

    def _order(self, rows: int) -> Any:
        return np.arange(rows) if self.shuffled is None else self.shuffled.permutation(rows)

    def __iter__(self) -> Iterator[Any]:
        rows = np.shape(flatten(self.arrays)[0])[0]
        order = self._order(rows)
        for index in range(len(self)):
            if self.batch_size is None:
                chosen = order[index]
            else:
                chosen = order[index * self.batch_size : (index + 1) * self.batch_size]
            yield map_leaves(lambda array: np.asarray(array)[chosen], self.arrays)  # noqa: B023
