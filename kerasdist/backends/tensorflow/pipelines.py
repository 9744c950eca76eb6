"""Pipelines of ``tf.data`` that Keras reads: which are tuned, when they begin, who ends them."""

from __future__ import annotations

import _thread
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from typing import Any, final

import tensorflow as tf

from kerasdist.backends.tensorflow.data_seam import LateIterator, calls_python


@final
class GlobalBatchDataset(tf.distribute.DistributedDataset):
    """A dataset of global batches that Keras takes for one that is distributed already.

    Keras would hand a plain dataset to ``experimental_distribute_dataset``, which cuts it into
    unequal steps (TRAPS, 2), shards it by file, and warns about that.
    """

    def __init__(self, dataset: Iterable[Any], spec: Any) -> None:
        """Wraps a dataset.

        Args:
            dataset: Yields global batches, or what a worker needs of them.
            spec: The types and shapes of a batch.
        """
        self._dataset = dataset
        self._spec = spec
        self._is_of_arrays = False
        self._begin: Callable[[Callable[[], Any]], Any] | None = None

    @classmethod
    def of_arrays(cls, dataset: tf.data.Dataset, spec: Any) -> GlobalBatchDataset:
        """Wraps slices of arrays, whose order depends on nothing that other iterators have done.

        Args:
            dataset: As Keras makes it; it has not run yet.
            spec: The types and shapes of a batch.
        """
        self = cls(_untuned(dataset), spec)
        self._is_of_arrays = True
        return self

    @classmethod
    def followed(cls, dataset: Any, begin: Callable[[Callable[[], Any]], Any]) -> Any:
        """Returns a dataset of which a function begins each iteration.

        Args:
            dataset: One of these datasets, or a ``tf.data.Dataset`` of a single device.
            begin: Is given what makes an iterator, and returns one.
        """
        if isinstance(dataset, tf.data.Dataset):
            dataset = cls(dataset, dataset.element_spec)
        if isinstance(dataset, cls):
            dataset._begin = begin
        return dataset

    def __iter__(self) -> Iterator[Any]:
        return self._iterator() if self._begin is None else self._begin(self._iterator)

    def _iterator(self) -> Iterator[Any]:
        if self._is_of_arrays:
            # At the end of an epoch Keras makes an iterator that it throws away at the beginning of
            # the next one. To begin it would take 10 to 20 ms, as much as some steps.
            return LateIterator(self._dataset)
        iterator = iter(self._dataset)
        if self._may_end_aside:
            _end_aside(iterator)
        return iterator

    @property
    def element_spec(self) -> Any:
        """The types and shapes of a global batch."""
        return self._spec

    @cached_property
    def _may_end_aside(self) -> bool:
        """Whether this is tuned, and nobody can tell when it ends: Python that it calls could."""
        dataset = self._dataset
        if not isinstance(dataset, tf.data.Dataset):
            return False
        return dataset.options().autotune.enabled is not False and not calls_python(dataset)


def _untuned(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns a dataset without the thread that tunes a pipeline while it runs.

    There is nothing to tune in slices of arrays. But the end of an iterator waits for that thread,
    which sometimes misses that it shall end and sleeps on: until as much time has passed as a power
    of two times 10 ms, a minute at most. An epoch of 2.6 s then takes 5.1 s; on workers of one core
    each every second epoch does. Plain Keras waits too (seen with 2.21): of 45 epochs of 1.5 s over
    a pipeline with a parallel `map`, at least 12 took 2.5 s.

    An iterator that is garbage for a while, such as Keras leaves of a generator without a length,
    does the same to whatever Python does when it is collected: of 20 that were 10 s old, one took
    10 s and one 20 s.

    Args:
        dataset: Yields slices of arrays.
    """
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)


def _end_aside(iterator: Any) -> None:
    """Lets a thread wait for the end of an iterator that is tuned (see `_untuned`).

    Args:
        iterator: A ``tf.data.Iterator``. What it stands for ends when nobody holds it any more.
    """
    held = tf.nest.flatten(iterator, expand_composites=True)
    # Not threading.Thread, which takes locks: an iterator may be collected while they are held.
    weakref.finalize(iterator, _thread.start_new_thread, held.clear, ()).atexit = False
