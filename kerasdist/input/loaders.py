"""Every n-th batch of a dataset with random access: the other batches are not read."""

from __future__ import annotations

import copy
import itertools
import sys
from collections.abc import Iterator
from typing import Any, Protocol, final, runtime_checkable

from kerasdist import keras_compat


@runtime_checkable
class KnowsEpoch(Protocol):
    """A sampler whose order depends on the epoch, such as `DistributedSampler`."""

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch."""


@final
class StridedSampler:
    """Every n-th element of a torch sampler, or of a batch sampler."""

    def __init__(self, sampler: Any, step: int, first: int) -> None:
        self._sampler = sampler
        self._step, self._first = step, first

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(self._sampler, self._first, None, self._step)

    def __len__(self) -> int:
        return len(range(self._first, len(self._sampler), self._step))


@final
class EveryNthBatch(keras_compat.PyDataset):
    """Every n-th batch of a `PyDataset`."""

    def __init__(self, dataset: Any, step: int, first: int) -> None:
        super().__init__(dataset.workers, dataset.use_multiprocessing, dataset.max_queue_size)
        self._dataset = dataset
        self._step, self._first = step, first

    @property
    def num_batches(self) -> int | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The number of these batches, None if they do not end."""
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
    # torch refuses to set this attribute, since a running loader would ignore it; this one is new.
    object.__setattr__(own, name, StridedSampler(getattr(loader, name), step, first))
    object.__setattr__(own, "_iterator", None)  # the other loader's, if its workers persist
    return own


def samplers_of(loader: Any) -> list[Any]:
    """Returns the samplers of a ``DataLoader``, each once."""
    batches = loader.batch_sampler
    listed = loader.sampler, batches, getattr(batches, "sampler", None)
    return list({id(one): one for one in listed if one is not None}.values())


def tell_epoch(loader: Any, epoch: int) -> None:
    """Sets the epoch of a ``DataLoader``'s samplers that know one."""
    for sampler in samplers_of(loader):
        if isinstance(sampler, KnowsEpoch):
            sampler.set_epoch(epoch)
