"""Data sources whose iterators can save a position, from which a later iterator can continue.

Such sources are ``tf.data`` pipelines, which Keras accepts on every backend, Grain's datasets and
loaders, and a ``DataLoader`` with ``state_dict`` and ``load_state_dict``, such as torchdata's.
Private attributes of TensorFlow's datasets show which operations a pipeline contains.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, final

from kerasdist.keras_compat import internals
from kerasdist.keras_compat.data import (
    is_any_of,
    is_grain_dataset,
    is_torch_dataloader,
    source_given,
    tensorflow_of,
)

Begun = Callable[[Callable[[], Any]], Any]
"""The type of a function that returns the iterator that Keras reads over a source.

The function gets as its argument a function that makes the source's own iterator.
"""

# The number of `tf.data.experimental.ExternalStatePolicy.IGNORE`. With this policy TensorFlow does
# not warn about state that it cannot save. kerasdist itself warns about such state.
_IGNORE = 1

# `_DRAWS`: operations that have a seed of their own, and draw new random numbers in each iteration.
# `_CHANGES`: operations that change a variable, such as the state of a random generator.
# `_PYTHON`: operations that call Python functions.
_DRAWS = ("Random", "TruncatedNormal", "ParameterizedTruncatedNormal", "Multinomial")
_CHANGES = ("Assign", "RngReadAndSkip", "RngSkip", "StatefulUniform", "StatefulStandardNormal")
_CHANGES += ("StatefulTruncatedNormal", "StatefulRandomBinomial")
_PYTHON = ("PyFunc", "EagerPyFunc", "PyFuncStateless")


def source_of(adapter: object) -> Any | None:
    """Returns the source that an adapter of Keras reads; None if no position can be saved.

    A loader of Grain restores a position only if its data source and its sampler have the same
    ``repr`` as when the position was saved. If a class does not define ``__repr__``, this text
    contains an address, so the loader counts as unable to save its position.
    """
    given = source_given(adapter)
    if is_grain_dataset(given):
        source = internals.GRAIN.of(adapter)
        parts = getattr(source, "_data_source", 0), getattr(source, "_sampler", 0)
        return None if any(type(one).__repr__ is object.__repr__ for one in parts) else source
    if is_torch_dataloader(given):
        return internals.LOADER.of(adapter) if loads_state(given) else None
    return None if tensorflow_of(given) is None else internals.PIPELINE.of(adapter)


def follow_source(adapter: object, source: object, begun: Begun) -> None:
    """Makes a Keras data adapter call `begun` for each new iterator over its source."""
    if is_grain_dataset(source):
        internals.GRAIN.set(adapter, _followed_by_grain(source, begun))
    elif is_torch_dataloader(source):
        internals.LOADER.set(adapter, _Followed(source, begun))
    else:
        internals.PIPELINE.set(adapter, _Followed(source, begun))


def begun_at(source: Any, make: Callable[[], Any], place: Any) -> Any:
    """Returns an iterator over a source, made by `make`, that continues from a saved position."""
    if loads_state(source):
        source.load_state_dict(place)
        return make()
    iterator = make()
    if _is_of_tensorflow(iterator):
        _set_state(iterator, place)
    else:
        iterator.set_state(place)
    return iterator


def begin_often(source: Any, count: int) -> None:
    """Begins `count` iterations over a pipeline, without reading them.

    Each time, the pipeline's shuffles draw a seed, as if `count` epochs had been read.
    """
    for _ in range(count):
        iter(source)


def place_of(source: Any, iterator: Any) -> Any:
    """Returns the position of an iterator, which must be the newest iterator over the source."""
    if loads_state(source):
        return source.state_dict()
    return _state_of(iterator) if _is_of_tensorflow(iterator) else iterator.get_state()


def loads_state(source: object) -> bool:
    """Returns whether an object saves its own state by ``state_dict`` and ``load_state_dict``."""
    return hasattr(source, "state_dict") and hasattr(source, "load_state_dict")


def _is_of_tensorflow(iterator: object) -> bool:
    return is_any_of(iterator, "tensorflow", "data.Iterator")


def _state_of(iterator: Any) -> bytes:
    """Returns a TensorFlow iterator's position, with the buffers and seeds of its shuffles."""
    tf, resource = sys.modules["tensorflow"], internals.ITERATOR_RESOURCE.of(iterator)
    state = tf.raw_ops.SerializeIterator(resource_handle=resource, external_state_policy=_IGNORE)
    return tf.io.serialize_tensor(state).numpy()


def _set_state(iterator: Any, state: bytes) -> None:
    """Sets the position of a TensorFlow iterator to a result of `_state_of`."""
    tf, resource = sys.modules["tensorflow"], internals.ITERATOR_RESOURCE.of(iterator)
    serialized = tf.io.parse_tensor(state, tf.variant)
    tf.raw_ops.DeserializeIterator(resource_handle=resource, serialized=serialized)


@final
@dataclass(frozen=True)
class PipelineFacts:
    """Facts about a pipeline that the saved states of its iterators do not contain.

    Attributes:
        calls_python: Whether the pipeline calls Python code, whose state TensorFlow cannot save.
        draws: Whether the pipeline's functions draw new random numbers in each iteration.
        is_cached: Whether a cache makes all iterations equal to the first one. Suppose that an
            iterator over such a pipeline continues from a state that was saved before the cache was
            full. If the state of this iterator is saved, TensorFlow may save an empty state.
        unrepeatable: Descriptions of the operations that draw random numbers without a seed, or
            from a random generator whose state is a variable.
    """

    calls_python: bool
    draws: bool
    is_cached: bool
    unrepeatable: tuple[str, ...]


def facts_of(dataset: object) -> PipelineFacts:
    """Returns the facts about a pipeline that its iterators' states do not contain."""
    steps = list(_pipeline(dataset))
    operations = [operation for step in steps for operation in _operations(step)]
    drawing = [one for one in operations if one.type.startswith(_DRAWS)]
    unseeded = {one.type for one in drawing if not (one.get_attr("seed") or one.get_attr("seed2"))}
    unseeded |= {"shuffle" for step in steps if _shuffles_without_seed(step)}
    changing = {one.type for one in operations if one.type.startswith(_CHANGES)}
    return PipelineFacts(
        calls_python=any(isinstance(step, internals.VARIANT.value) for step in steps)
        or any(one.type in _PYTHON for one in operations),
        draws=bool(drawing),
        is_cached=_is_cached(dataset),
        unrepeatable=tuple(
            [f"{name} without a seed" for name in sorted(unseeded)]
            + [f"{name} of a variable" for name in sorted(changing)]
        ),
    )


def _is_cached(step: Any) -> bool:
    while not isinstance(step, internals.CACHE.value):
        inputs = internals.INPUTS_OF_PIPELINE.of(step)()
        draws = any(one.type.startswith(_DRAWS) for one in _operations(step))
        if draws or isinstance(step, internals.SHUFFLE.value) or len(inputs) != 1:
            return False
        [step] = inputs
    return True


def _shuffles_without_seed(step: Any) -> bool:
    if not isinstance(step, internals.SHUFFLE.value):
        return False
    seeds = internals.SHUFFLE_SEED.of(step), internals.SHUFFLE_SECOND_SEED.of(step)
    return not any(map(int, seeds))


def _pipeline(dataset: Any) -> Iterator[Any]:
    yield dataset
    for one in internals.INPUTS_OF_PIPELINE.of(dataset)():
        yield from _pipeline(one)


def _operations(step: Any) -> Iterator[Any]:
    """Yields the operations in the functions of a pipeline step, and in functions inside these."""
    functions = internals.FUNCTIONS_OF_PIPELINE.of(step)()
    graphs = [wrapper.function.graph for wrapper in functions]
    while graphs:
        graph = graphs.pop()
        yield from graph.get_operations()
        graphs += [function.graph for function in internals.FUNCTIONS_OF_GRAPH.of(graph).values()]


@final
class _Followed:
    """Replaces a source in Keras's data adapter, so that `begun` makes the iterators."""

    def __init__(self, source: Any, begun: Begun) -> None:
        self._source = source
        self._begun = begun

    def __iter__(self) -> Iterator[Any]:
        return self._begun(lambda: iter(self._source))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)


def _followed_by_grain(source: Any, begun: Begun) -> Any:
    """Returns a Grain dataset that does the same as `_Followed`.

    `_Followed` does not suffice here: Keras calls the method `map` of a Grain dataset, and
    `_Followed` would pass this call on to the source.
    """
    grain: Any = sys.modules["grain"]

    class Iterating(grain.DatasetIterator):
        def __init__(self, batches: Iterator[Any]) -> None:
            super().__init__()
            self._batches = batches

        def __next__(self) -> Any:
            return next(self._batches)

        def get_state(self) -> dict[str, Any]:
            return {}  # the state of the source's own iterator is saved instead

        def set_state(self, state: dict[str, Any]) -> None:
            """Does nothing: a restart sets the state of the source's own iterator instead."""

    class Followed(grain.IterDataset):
        def __iter__(self) -> Iterating:
            return Iterating(begun(lambda: iter(source)))

    return Followed()
