"""Data adapters of a worker. Of arrays a worker reads only its own rows, of other data all rows.

Rows are copied to a GPU one batch ahead, from page-locked memory
(`kerasdist.backends.torch.replica.placing.move`) and in a CUDA stream of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, final

import keras
import torch

from kerasdist import keras_compat
from kerasdist.agreement.batches import FirstBatches
from kerasdist.backends.torch.replica.placing import move
from kerasdist.core.structures import flatten, map_leaves
from kerasdist.input.fit_adapter import WrappedAdapter
from kerasdist.input.sharding import OwnNumbers, WorkerShard


@final
class OwnRowsAdapter(WrappedAdapter):
    """Yields this worker's rows of each batch, or all rows of a batch that is not divided."""

    def __init__(self, inner: Any, workers: int, rank: int, device: torch.device) -> None:
        super().__init__(inner)
        self._own = OwnNumbers(workers, rank)
        self._device = device

    def get_torch_dataloader(self) -> Any:
        """Returns this object, over which Keras iterates once per epoch."""
        return self

    def __iter__(self) -> Iterator[Any]:
        own = self._own
        found = keras_compat.torch_rows(self._inner, own)
        batches = (own.batch(rows, total) for rows, total in found)
        if self._device.type != "cuda":
            return batches
        return ahead(_on_host(batches), self._device)


def _on_host(batches: Iterator[Any]) -> Iterator[Any]:
    while True:
        with keras.device("cpu"):  # otherwise Keras would copy the rows to the GPU, and wait
            batch = next(batches, None)
        if batch is None:
            return
        yield batch


@final
class WholeBatchesAdapter(WrappedAdapter):
    """Yields every batch of a source; in each iteration, workers compare their first batches."""

    def __init__(self, inner: Any, first_batches: FirstBatches) -> None:
        super().__init__(inner)
        self._first_batches = first_batches

    def get_torch_dataloader(self) -> Any:
        """Returns this object, over which Keras iterates once per epoch."""
        return self

    def __iter__(self) -> Iterator[Any]:
        return self._first_batches.recorded(iter(self._inner.get_torch_dataloader()))


def ahead(batches: Iterable[Any], device: torch.device) -> Iterator[Any]:
    """Copies the host's batches to a GPU, one batch ahead, and yields them."""
    stream = torch.cuda.Stream(device)
    waiting: tuple[Any, torch.Event] | None = None
    for batch in batches:
        with torch.cuda.stream(stream):
            copied = _with_rows(batch, map_leaves(lambda leaf: move(device, leaf), _rows(batch)))
            following = copied, stream.record_event()
        if waiting is not None:
            yield _arrived(*waiting, device)
        waiting = following
    if waiting is not None:
        yield _arrived(*waiting, device)


def _rows(batch: object) -> Any:
    return batch.rows if isinstance(batch, WorkerShard) else batch


def _with_rows(batch: object, rows: object) -> Any:
    return replace(batch, rows=rows) if isinstance(batch, WorkerShard) else rows


def _arrived(batch: object, event: torch.Event, device: torch.device) -> Any:
    """Makes the GPU's next operations wait for the copy of a batch; returns the batch."""
    current = torch.cuda.current_stream(device)
    current.wait_event(event)
    for leaf in flatten(_rows(batch)):
        if isinstance(leaf, torch.Tensor):
            leaf.record_stream(current)  # so that torch frees it after its use in this stream
    return batch
