"""Data adapters for `fit`: wrappers of Keras's adapters, and adapters for distributed datasets."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, cast, final

import numpy as np

from kerasdist import keras_compat
from kerasdist.core.structures import transpose
from kerasdist.errors import InputError
from kerasdist.input.autoshard import OwnSource, WorkerBatches
from kerasdist.input.distributed import (
    DividedDataset,
    GatheredDataset,
    ShardedDataset,
    equivalent,
    job_of,
)
from kerasdist.input.sources import length_of


def whole(dataset: object, **beside: object) -> Any:
    """Returns the global batches of a distributed dataset, in a form that Keras's adapters accept.

    Any other dataset is returned as it is. `beside` has further arguments of `fit`, such as `y`.
    An argument that a distributed dataset does not allow raises an error.
    """
    ours = equivalent(dataset)
    if isinstance(ours, ShardedDataset):
        _refuse(beside)
        if inspect.isgenerator(ours.source.source.whole):
            raise InputError(
                "Expected a dataset that can be iterated again if each worker reads a part of it: "
                "Keras looks at a batch before it trains. Received: a generator. Pass a "
                "keras.utils.PyDataset, a tf.data.Dataset, a DataLoader or a list of batches."
            )
        return ours.source
    if isinstance(ours, GatheredDataset):
        source: Any = Rounds(ours)
        job = job_of(ours.strategy)
        if job is not None:
            _refuse(beside)
            own = OwnSource(source, source, sizes=ours.sizes_of_rounds())
            return WorkerBatches(own, job)
    elif isinstance(ours, DividedDataset):
        source = ours.source
    else:
        return dataset  # data that kerasdist did not distribute
    if keras_compat.is_dataset(source) or inspect.isgenerator(source):
        return source
    _refuse(beside)
    inner = keras_compat.get_data_adapter(_examples(source))
    keras_compat.internals.GENERATOR.set(inner, lambda: _examples(source))
    return _BatchesAdapter(inner, source)


def as_plain_keras(dataset: object) -> Any:
    """Returns the global batches of a distributed dataset, for a model without a strategy."""
    source = whole(dataset)
    if isinstance(source, WorkerBatches):
        raise InputError(
            "Expected a model that was made in a strategy's scope, for a dataset of which each "
            "worker reads a part. Received: a model of no strategy. Make the model in the scope, "
            "or give it the dataset that you distributed."
        )
    return source


def _refuse(beside: Mapping[str, Any]) -> None:
    named = ("y", "sample_weight", "class_weight")
    given = [name for name in named if beside.get(name) is not None]
    if given:
        raise InputError(
            "Expected nothing beside a distributed dataset, whose batches are (x, y) or "
            f"(x, y, sample_weight). Received: {', '.join(given)}. Put them into the batches."
        )


@final
class Rounds:
    """Batches for `fit`. Each of them concatenates one batch of every replica in this process."""

    def __init__(self, dataset: GatheredDataset) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __iter__(self) -> Iterator[Any]:
        for batches in self._dataset.rounds():
            yield transpose(batches, _joined)


def _joined(leaves: Sequence[Any]) -> Any:
    if len(getattr(leaves[0], "shape", ())) == 0:
        return leaves[0]
    return np.concatenate([np.asarray(leaf) for leaf in leaves])


def _examples(source: Any) -> Iterator[tuple[Any, ...]]:
    for batch in source:
        grouped = isinstance(batch, list | tuple)
        yield tuple(cast("Sequence[Any]", batch)) if grouped else (batch,)


class WrappedAdapter(keras_compat.DataAdapter):
    """A base class of adapters that wrap an inner adapter, and have the inner one's properties.

    A subclass overrides `begun`, which yields the batches, to change them. `get_tf_dataset` does
    not call `begun`, because a graph reads its batches.
    """

    # kerasdist itself places batches on devices. Without this attribute, Keras 3.12 on JAX would
    # first copy each batch to a device.
    builtin_prefetch = True

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    @staticmethod
    def innermost(adapter: Any) -> Any:
        """Returns the innermost adapter, which the other adapters wrap."""
        while isinstance(adapter, WrappedAdapter):
            adapter = adapter._inner
        return adapter

    @staticmethod
    def reads_arrays(adapter: Any) -> bool:
        """Returns whether an adapter is or wraps Keras's adapter of arrays, which shuffles rows."""
        return keras_compat.is_array_adapter(WrappedAdapter.innermost(adapter))

    def begun(self, make: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Returns an iterator over the batches of this adapter.

        `make` returns an iterator over the batches of the inner adapter. This base class returns
        these batches unchanged.
        """
        return make()

    def get_numpy_iterator(self) -> Iterator[Any]:
        """Returns the batches as NumPy arrays."""
        return self.begun(lambda: iter(self._inner.get_numpy_iterator()))

    def get_jax_iterator(self, super_batch: int | None = None) -> Iterator[Any]:
        """Returns the batches for JAX; Keras 3.16 and later may pass `super_batch`."""
        given = {} if super_batch is None else {"super_batch": super_batch}
        return self.begun(lambda: iter(self._inner.get_jax_iterator(**given)))

    def get_torch_dataloader(self) -> Iterator[Any]:
        """Returns the batches for PyTorch."""
        return self.begun(lambda: iter(self._inner.get_torch_dataloader()))

    def get_tf_dataset(self) -> Any:
        """Returns the batches as a dataset, which a graph of TensorFlow reads."""
        return self._inner.get_tf_dataset()

    @property
    def num_batches(self) -> int | None:
        """Number of batches; None if it is not known."""
        return self._inner.num_batches

    batch_size = property(attrgetter("_inner.batch_size"))
    has_partial_batch = property(attrgetter("_inner.has_partial_batch"))
    partial_batch_size = property(attrgetter("_inner.partial_batch_size"))

    def on_epoch_begin(self) -> None:
        """Passes the event on to the inner adapter."""
        self._inner.on_epoch_begin()

    def on_epoch_end(self) -> None:
        """Passes the event on to the inner adapter."""
        self._inner.on_epoch_end()


@final
class _BatchesAdapter(WrappedAdapter):
    """Batches of a source that is iterated once per epoch, in the order of the source."""

    def __init__(self, inner: Any, source: Any) -> None:
        """Stores the source, and `inner`: Keras's generator adapter, which reads the source."""
        super().__init__(inner)
        self._source = source

    @property
    def num_batches(self) -> int | None:
        """The number of batches; None if the source does not know it."""
        return length_of(self._source)
