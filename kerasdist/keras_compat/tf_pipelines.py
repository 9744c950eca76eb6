"""Saves and restores the positions of iterators over ``tf.data`` pipelines.

Keras takes such pipelines on every backend. Private attributes of TensorFlow's datasets tell which
operations are in one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, final

from keras.src.trainers.data_adapters.tf_dataset_adapter import TFDatasetAdapter
from keras.src.utils.module_utils import tensorflow as tf

# `tf.data.experimental.ExternalStatePolicy.IGNORE`: kerasdist itself warns about lost state.
_IGNORE = 1

# Operations that draw by a seed of their own, other numbers in each iteration; and operations that
# draw from a variable or change one.
_DRAWS = ("Random", "TruncatedNormal", "ParameterizedTruncatedNormal", "Multinomial")
_CHANGES = ("Assign", "RngReadAndSkip", "RngSkip", "StatefulUniform", "StatefulStandardNormal")
_CHANGES += ("StatefulTruncatedNormal", "StatefulRandomBinomial")
_PYTHON = ("PyFunc", "EagerPyFunc", "PyFuncStateless")


def dataset_of(adapter: Any) -> Any | None:
    """Returns the ``tf.data.Dataset`` that a data adapter reads, None if it reads another kind."""
    if not isinstance(adapter, TFDatasetAdapter):
        return None
    dataset = adapter._dataset
    return dataset if isinstance(dataset, tf.data.Dataset) else None


def replace_dataset(adapter: Any, dataset: Any) -> None:
    """Lets one of Keras's data adapters read another dataset."""
    adapter._dataset = dataset


def state_of(iterator: Any) -> bytes:
    """Returns the position of an iterator, with the buffers and seeds of its shuffles."""
    state = tf.raw_ops.SerializeIterator(
        resource_handle=iterator._iterator_resource, external_state_policy=_IGNORE
    )
    return tf.io.serialize_tensor(state).numpy()


def set_state(iterator: Any, state: bytes) -> None:
    """Sets the position of an iterator."""
    tf.raw_ops.DeserializeIterator(
        resource_handle=iterator._iterator_resource,
        serialized=tf.io.parse_tensor(state, tf.variant),
    )


@final
@dataclass(frozen=True)
class PipelineFacts:
    """The state of a pipeline that is not in its iterators.

    Attributes:
        calls_python: Whether the pipeline calls Python code, whose state TensorFlow cannot save.
        draws: Whether the pipeline's functions draw new random numbers in each iteration.
        unrepeatable: The operations that draw without a seed, or from a variable.
    """

    calls_python: bool
    draws: bool
    unrepeatable: tuple[str, ...]


def facts_of(dataset: Any) -> PipelineFacts:
    """Returns the state of a pipeline that is not in its iterators."""
    steps = list(_pipeline(dataset))
    operations = [operation for step in steps for operation in _operations(step)]
    drawing = [one for one in operations if one.type.startswith(_DRAWS)]
    unseeded = {one.type for one in drawing if not (one.get_attr("seed") or one.get_attr("seed2"))}
    unseeded |= {"shuffle" for step in steps if _shuffles_without_seed(step)}
    changing = {one.type for one in operations if one.type.startswith(_CHANGES)}
    return PipelineFacts(
        calls_python=any(type(step).__name__ == "_VariantDataset" for step in steps)
        or any(one.type in _PYTHON for one in operations),
        draws=bool(drawing),
        unrepeatable=tuple(
            [f"{name} without a seed" for name in sorted(unseeded)]
            + [f"{name} of a variable" for name in sorted(changing)]
        ),
    )


def _shuffles_without_seed(step: Any) -> bool:
    if type(step).__name__ != "_ShuffleDataset":
        return False
    return not (int(step._seed) or int(step._seed2))


def _pipeline(dataset: Any) -> Iterator[Any]:
    yield dataset
    for one in dataset._inputs():
        yield from _pipeline(one)


def _operations(step: Any) -> Iterator[Any]:
    """Returns the operations in the functions of a step, and in functions within them."""
    graphs = [wrapper.function.graph for wrapper in step._functions()]
    while graphs:
        graph = graphs.pop()
        yield from graph.get_operations()
        graphs += [function.graph for function in graph._functions.values()]


@final
class FollowedIterations:
    """The iterations over a pipeline, with the position of the last one.

    Each iteration draws the seeds of its shuffles when it begins. So the position between two
    epochs is the beginning of the next one: that iterator is made ahead, and used when Keras asks
    for it.
    """

    def __init__(self, record: Callable[[bytes], None]) -> None:
        self._record = record
        self._last: Any = None
        self._ahead: Any = None
        self._make: Any = None
        self._to: bytes | None = None

    def begun(self, make: Any) -> Any:
        """Returns an iterator from the beginning, or from the position of `go_to`."""
        self._make = make
        iterator, self._ahead = self._ahead if self._ahead is not None else make(), None
        if self._to is not None:
            set_state(iterator, self._to)
            self._to = None
        self._last = iterator
        self._record(state_of(iterator))
        return iterator

    def place(self) -> bytes | None:
        """Returns the position of the last iterator, None if there is none."""
        return None if self._last is None else state_of(self._last)

    def next_place(self) -> bytes | None:
        """Returns the position of the next iterator, None before the first one is made."""
        if self._ahead is None and self._make is not None:
            self._ahead = self._make()
        return None if self._ahead is None else state_of(self._ahead)

    def go_to(self, place: bytes) -> None:
        """Sets the position of the next iterator."""
        self._to = place


@final
class FollowedDataset:
    """Stands in for a dataset in a Keras data adapter that iterates over it in Python."""

    def __init__(self, dataset: Any, iterations: FollowedIterations) -> None:
        self._dataset = dataset
        self._iterations = iterations

    def __iter__(self) -> Iterator[Any]:
        return self._iterations.begun(lambda: iter(self._dataset))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dataset, name)
