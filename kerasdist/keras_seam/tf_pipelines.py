"""The places of iterators over ``tf.data`` pipelines: to keep them, and to come back to them.

Keras takes such pipelines on every backend. Which operations are in one, TensorFlow's private
parts say, as far as they are attributes of the dataset.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, final

from keras.src.trainers.data_adapters.tf_dataset_adapter import TFDatasetAdapter
from keras.src.utils.module_utils import tensorflow as tf

# `tf.data.experimental.ExternalStatePolicy.IGNORE`: what cannot be kept is said once, by us.
_IGNORE = 1

# Operations that draw by a seed of their own, other numbers in each iteration; and operations that
# draw from a variable or change one.
_DRAWS = ("Random", "TruncatedNormal", "ParameterizedTruncatedNormal", "Multinomial")
_CHANGES = ("Assign", "RngReadAndSkip", "RngSkip", "StatefulUniform", "StatefulStandardNormal")
_CHANGES += ("StatefulTruncatedNormal", "StatefulRandomBinomial")
_PYTHON = ("PyFunc", "EagerPyFunc", "PyFuncStateless")


def dataset_of(adapter: Any) -> Any | None:
    """Returns the ``tf.data.Dataset`` that one of Keras's data adapters reads, None if it is none.

    Args:
        adapter: A data adapter.
    """
    if not isinstance(adapter, TFDatasetAdapter):
        return None
    dataset = adapter._dataset
    return dataset if isinstance(dataset, tf.data.Dataset) else None


def replace_dataset(adapter: Any, dataset: Any) -> None:
    """Lets one of Keras's data adapters read another dataset.

    Args:
        adapter: An adapter of which `dataset_of` knows the dataset.
        dataset: Anything with the methods of a ``tf.data.Dataset`` that the adapter calls.
    """
    adapter._dataset = dataset


def state_of(iterator: Any) -> bytes:
    """Returns where an iterator is: what its shuffles hold and draw next, and what it has read.

    Args:
        iterator: A ``tf.data.Iterator``.
    """
    state = tf.raw_ops.SerializeIterator(
        resource_handle=iterator._iterator_resource, external_state_policy=_IGNORE
    )
    return tf.io.serialize_tensor(state).numpy()


def set_state(iterator: Any, state: bytes) -> None:
    """Lets an iterator go on from a place.

    Args:
        iterator: A ``tf.data.Iterator`` over an equal pipeline.
        state: What `state_of` returned.
    """
    tf.raw_ops.DeserializeIterator(
        resource_handle=iterator._iterator_resource,
        serialized=tf.io.parse_tensor(state, tf.variant),
    )


@final
@dataclass(frozen=True)
class PipelineFacts:
    """What a pipeline has beside the places of its iterators.

    Attributes:
        calls_python: Whether it calls Python, whose state TensorFlow cannot keep.
        draws: Whether its functions draw random numbers, other ones in each iteration.
        unrepeatable: What draws without a seed, or from a variable.
    """

    calls_python: bool
    draws: bool
    unrepeatable: tuple[str, ...]


def facts_of(dataset: Any) -> PipelineFacts:
    """Returns what a pipeline has beside the places of its iterators.

    Args:
        dataset: A ``tf.data.Dataset``.
    """
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
    """The operations in a step's functions, and in functions within them."""
    graphs = [wrapper.function.graph for wrapper in step._functions()]
    while graphs:
        graph = graphs.pop()
        yield from graph.get_operations()
        graphs += [function.graph for function in graph._functions.values()]


@final
class FollowedIterations:
    """The iterations over a pipeline, of which the last one's place can be asked for.

    Each iteration draws the seeds of its shuffles as it begins. So the place between two epochs is
    the begin of the next one: it is begun ahead, and used when Keras asks for it.
    """

    def __init__(self, note: Callable[[bytes], None]) -> None:
        """Begins without one.

        Args:
            note: Is given the place of each iterator when it begins.
        """
        self._note = note
        self._last: Any = None
        self._ahead: Any = None
        self._make: Any = None
        self._to: bytes | None = None

    def begun(self, make: Any) -> Any:
        """Returns an iterator that begins, or goes on where it is to go on.

        Args:
            make: Makes one.
        """
        self._make = make
        iterator, self._ahead = self._ahead if self._ahead is not None else make(), None
        if self._to is not None:
            set_state(iterator, self._to)
            self._to = None
        self._last = iterator
        self._note(state_of(iterator))
        return iterator

    def place(self) -> bytes | None:
        """Returns where the last iterator is, None if there is none."""
        return None if self._last is None else state_of(self._last)

    def next_place(self) -> bytes | None:
        """Returns where the next iterator will begin, None if there was none yet."""
        if self._ahead is None and self._make is not None:
            self._ahead = self._make()
        return None if self._ahead is None else state_of(self._ahead)

    def go_to(self, place: bytes) -> None:
        """Lets the next iterator go on from a place.

        Args:
            place: What `place` or `next_place` returned.
        """
        self._to = place


@final
class FollowedDataset:
    """Stands for a dataset in one of Keras's data adapters, which iterates over it in Python."""

    def __init__(self, dataset: Any, iterations: FollowedIterations) -> None:
        """Wraps a dataset.

        Args:
            dataset: A ``tf.data.Dataset``.
            iterations: What follows its iterations.
        """
        self._dataset = dataset
        self._iterations = iterations

    def __iter__(self) -> Iterator[Any]:
        return self._iterations.begun(lambda: iter(self._dataset))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dataset, name)
