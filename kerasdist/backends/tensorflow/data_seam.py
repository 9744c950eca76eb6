"""Private parts of ``tf.data``; a test watches each of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

import tensorflow as tf
from tensorflow.python.data.ops import dataset_ops, iterator_ops


@contextmanager
def keeping_input_devices(engine: tf.distribute.Strategy) -> Iterator[None]:
    """Keeps the devices of an engine's input pipelines as they are.

    A dataset with a pipeline a replica changes them for good: every later dataset of the engine
    would get a pipeline a replica, too, and each replica the same batches (seen with 2.21).

    Args:
        engine: The strategy.
    """
    devices = engine.extended._input_workers_devices
    try:
        yield
    finally:
        engine.extended._input_workers_devices = devices


_PYTHON = frozenset(("EagerPyFunc", "PyFunc", "PyFuncStateless"))


def calls_python(dataset: tf.data.Dataset) -> bool:
    """Returns whether a pipeline calls Python functions, such as generators, or may do so.

    Args:
        dataset: The pipeline.
    """
    if isinstance(dataset, dataset_ops._VariantDataset):
        return True  # nobody knows what is in it
    graphs = (wrapper.function.graph for wrapper in dataset._functions())
    return any(map(_has_python, graphs)) or any(map(calls_python, dataset._inputs()))


def _has_python(graph: Any) -> bool:
    # Not by the graph's description, into which large constants would be copied.
    inner = (function.graph for function in graph._functions.values())
    return any(one.type in _PYTHON for one in graph.get_operations()) or any(
        map(_has_python, inner)
    )


# What a `tf.data.Iterator` has from its begin on.
_BEGUN = frozenset(("_iterator_resource", "_flat_output_types", "_flat_output_shapes"))


@final
class LateIterator(iterator_ops.OwnedIterator):
    """A ``tf.data.Iterator`` that begins when it is first asked for something."""

    def _create_iterator(self, dataset: Any) -> None:
        self._dataset = dataset
        self._element_spec = dataset.element_spec

    def __getattr__(self, name: str) -> Any:
        if name not in _BEGUN:
            raise AttributeError(name)
        with tf.init_scope():
            super()._create_iterator(self._dataset)
        return vars(self)[name]
