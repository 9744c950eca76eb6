"""Starts and ends ``tf.data`` iterators without delay; ADR 22 has the measurements."""

from __future__ import annotations

import _thread
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, final

import tensorflow as tf
from tensorflow.python.data.ops import dataset_ops, iterator_ops


def iteration(dataset: tf.data.Dataset, *, begins_late: bool) -> Callable[[], Any]:
    """Returns a function that makes an iterator over a dataset.

    At the end of an epoch, Keras makes an iterator that it drops at the beginning of the next one.
    Starting it takes 10 to 20 ms, as long as some steps; with `begins_late`, first use starts it.
    """
    if begins_late:
        return partial(LateIterator, untuned(dataset))
    # A pipeline that calls Python code must not end in another thread.
    if dataset.options().autotune.enabled is False or calls_python(dataset):
        return partial(iter, dataset)

    def begun() -> Any:
        iterator = iter(dataset)
        ended_aside(iterator, tf.nest.flatten(iterator, expand_composites=True))
        return iterator

    return begun


def untuned(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns a dataset without autotuning, for which TensorFlow runs a thread per iterator.

    There is nothing to tune in slices of arrays. But an iterator that ends waits for that thread,
    which sometimes misses the request to stop and sleeps on, for 10 ms times a power of two, a
    minute at most. An epoch of 2.6 s then takes 5.1 s; on workers with one core each, every second
    epoch does. Plain Keras waits too (seen with 2.21): of 45 epochs of 1.5 s over a pipeline with
    a parallel `map`, at least 12 took 2.5 s.

    If an iterator is garbage for a while, as Keras leaves one of a generator without a length, the
    code during which it is collected waits: of 20 that were 10 s old, one took 10 s and one 20 s.
    """
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)


def ended_aside(iterator: Any, held: list[Any]) -> None:
    """Ends the pipeline of an autotuned iterator, `held`, in another thread (see `untuned`)."""
    # Not threading.Thread, which takes locks: an iterator may be collected while they are held.
    weakref.finalize(iterator, _thread.start_new_thread, held.clear, ()).atexit = False


_PYTHON = frozenset(("EagerPyFunc", "PyFunc", "PyFuncStateless"))


def calls_python(dataset: tf.data.Dataset) -> bool:
    """Returns whether a pipeline calls Python functions, such as generators, or may do so."""
    if isinstance(dataset, dataset_ops._VariantDataset):
        return True  # its functions cannot be listed
    graphs = (wrapper.function.graph for wrapper in dataset._functions())
    return any(map(_has_python, graphs)) or any(map(calls_python, dataset._inputs()))


def _has_python(graph: Any) -> bool:
    # Not from `graph.as_graph_def()`, which would copy large constants.
    inner = (function.graph for function in graph._functions.values())
    return any(one.type in _PYTHON for one in graph.get_operations()) or any(
        map(_has_python, inner)
    )


# Attributes that a `tf.data.Iterator` gets when it is started.
_BEGUN = frozenset(("_iterator_resource", "_flat_output_types", "_flat_output_shapes"))


@final
class LateIterator(iterator_ops.OwnedIterator):
    """A ``tf.data.Iterator`` that starts when it is first used."""

    def _create_iterator(self, dataset: Any) -> None:
        self._dataset = dataset
        self._element_spec = dataset.element_spec

    def __getattr__(self, name: str) -> Any:
        if name not in _BEGUN:
            raise AttributeError(name)
        with tf.init_scope():
            super()._create_iterator(self._dataset)
        return vars(self)[name]
