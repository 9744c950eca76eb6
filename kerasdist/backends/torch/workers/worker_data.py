"""Data adapters of a worker, which reads only its own rows of arrays, but other data whole.

Rows are copied to a GPU one batch ahead, from page-locked memory
(`kerasdist.backends.torch.replica.placing.move`) and in a CUDA stream of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import starmap
from typing import Any, final

import keras
import torch

from kerasdist import keras_compat
from kerasdist.agreement.batches import FirstBatches
from kerasdist.backends.torch.replica.placing import move
from kerasdist.core.structures import flatten, map_leaves
from kerasdist.input.distributed import read_ahead
from kerasdist.input.fit_adapter import WrappedAdapter
from kerasdist.input.sharding import WorkerShard, bounds_of_replica


@final
class OwnRowsAdapter(WrappedAdapter):
    """Yields this worker's rows of each batch, as a `WorkerShard`.

    A batch with fewer rows than workers is not divided: each worker gets all rows of the batch.
    """

    def __init__(self, inner: Any, workers: int, rank: int, device: torch.device) -> None:
        super().__init__(inner)
        self._workers, self._rank = workers, rank
        self._device = device

    def get_torch_dataloader(self) -> Iterator[Any]:
        """Returns an iterator over this worker's rows of each batch. Other rows are not read."""
        found = keras_compat.torch_rows(self._inner, self._own_numbers)
        if self._device.type == "cuda":
            found = ahead(_on_host(found), self._device)
        return starmap(self._as_shard, found)

    def _own_numbers(self, numbers: Any) -> Any:
        if len(numbers) < self._workers:
            return numbers
        begin, end = bounds_of_replica(len(numbers), self._workers, self._rank)
        return numbers[begin:end]

    def _as_shard(self, rows: Any, total: int) -> Any:
        if total < self._workers:
            return rows
        begin, end = bounds_of_replica(total, self._workers, self._rank)
        return WorkerShard(rows, end - begin, total, self._rank, self._workers)


def _on_host(batches: Iterator[Any]) -> Iterator[Any]:
    while True:
        with keras.device("cpu"):  # otherwise Keras would copy the rows to the GPU, and wait
            batch = next(batches, None)
        if batch is None:
            return
        yield batch


@final
class WholeBatchesAdapter(WrappedAdapter):
    """Yields every batch of a source. Records batches, so that workers can compare their data."""

    def __init__(self, inner: Any, first_batches: FirstBatches) -> None:
        super().__init__(inner)
        self._first_batches = first_batches

    def begun(self, make: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Returns the batches of the source, and records them, to compare them between workers."""
        return self._first_batches.recorded(make())


def ahead(batches: Iterable[Any], device: torch.device) -> Iterator[Any]:
    """Copies the tensors in the host's batches to a GPU, one batch ahead; yields the batches."""
    stream = torch.cuda.Stream(device)

    def copied(batch: object) -> tuple[Any, torch.Event]:
        with torch.cuda.stream(stream):
            return map_leaves(lambda leaf: move(device, leaf), batch), stream.record_event()

    for batch, event in read_ahead(map(copied, batches), 1):
        yield _arrived(batch, event, device)


def _arrived(batch: object, event: torch.Event, device: torch.device) -> Any:
    """Makes the GPU's next operations wait for the copy of a batch; returns the batch."""
    current = torch.cuda.current_stream(device)
    current.wait_event(event)
    for leaf in flatten(batch):
        if isinstance(leaf, torch.Tensor):
            leaf.record_stream(current)  # so that torch frees it after its use in this stream
    return batch
