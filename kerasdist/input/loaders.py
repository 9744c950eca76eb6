"""One worker's part of a dataset that can be asked for single batches: the others are not read."""

from __future__ import annotations

import copy
import itertools
import sys
from collections.abc import Iterator
from typing import Any, Protocol, final, runtime_checkable

from kerasdist import keras_seam


@runtime_checkable
class KnowsEpoch(Protocol):
    """A sampler whose order follows from the number of the epoch, as `DistributedSampler`'s."""

    def set_epoch(self, epoch: int) -> None:
        """Notes the epoch.

        Args:
            epoch: Its number, from 0.
        """


@final
class EveryNth:
    """Some elements of a torch sampler, or of a batch sampler."""

    def __init__(self, sampler: Any, step: int, first: int) -> None:
        """Notes which.

        Args:
            sampler: All elements.
            step: Of how many elements one is taken.
            first: The first of them.
        """
        self._sampler = sampler
        self._step, self._first = step, first

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(self._sampler, self._first, None, self._step)

    def __len__(self) -> int:
        """Returns how many they are."""
        return len(range(self._first, len(self._sampler), self._step))


@final
class EveryNthBatch(keras_seam.PyDataset):
    """Some batches of a `PyDataset`."""

    def __init__(self, dataset: Any, step: int, first: int) -> None:
        """Notes which.

        Args:
            dataset: All batches.
            step: Of how many batches one is taken.
            first: The first of them.
        """
        super().__init__(dataset.workers, dataset.use_multiprocessing, dataset.max_queue_size)
        self._dataset = dataset
        self._step, self._first = step, first

    @property
    def num_batches(self) -> int | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """How many they are, None if they do not end."""
        count = self._dataset.num_batches
        return None if count is None else len(range(self._first, count, self._step))

    def __getitem__(self, index: int) -> Any:
        return self._dataset[self._first + index * self._step]

    def on_epoch_begin(self) -> None:
        """Tells the dataset."""
        self._dataset.on_epoch_begin()

    def on_epoch_end(self) -> None:
        """Tells the dataset."""
        self._dataset.on_epoch_end()


def every_nth_of_loader(loader: Any, step: int, first: int) -> Any | None:
    """Returns a torch ``DataLoader`` of some of another one's batches.

    Args:
        loader: All batches.
        step: Of how many batches one is taken.
        first: The first of them.

    Returns:
        The loader; None if its dataset can only be read from the beginning.
    """
    if isinstance(loader.dataset, sys.modules["torch.utils.data"].IterableDataset):
        return None
    own = copy.copy(loader)
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    # torch refuses to set it, since a loader that has begun would not notice; this one has not.
    object.__setattr__(own, name, EveryNth(getattr(loader, name), step, first))
    object.__setattr__(own, "_iterator", None)  # of workers that stay from epoch to epoch
    return own


def tell_epoch(loader: Any, epoch: int) -> None:
    """Tells the samplers of a torch ``DataLoader`` that know epochs which one begins.

    Args:
        loader: The loader.
        epoch: Its number, from 0.
    """
    batches = loader.batch_sampler
    within = None if batches is None else getattr(batches, "sampler", None)
    for sampler in {id(one): one for one in (loader.sampler, batches, within)}.values():
        if isinstance(sampler, KnowsEpoch):
            sampler.set_epoch(epoch)
