"""Data adapters of a worker: it reads only its own rows of arrays, all rows of other sources."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, final

import keras
import torch

from kerasdist import keras_compat
from kerasdist.agreement.batches import FirstBatches
from kerasdist.backends.torch.fit import gpu_input
from kerasdist.input.adapter import WrappedAdapter
from kerasdist.input.worker_shard import OwnNumbers


@final
class OwnRowsAdapter(WrappedAdapter):
    """Yields this worker's rows of each batch, or all rows of a batch that is not divided."""

    def __init__(self, inner: Any, replicas: int, own: range, device: torch.device) -> None:
        super().__init__(inner)
        self._own = OwnNumbers(replicas, own)
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
        return gpu_input.ahead(_on_host(batches), self._device)


def _on_host(batches: Iterator[Any]) -> Iterator[Any]:
    while True:
        with keras.device("cpu"):  # else Keras would copy the rows to the GPU, and wait
            batch = next(batches, None)
        if batch is None:
            return
        yield batch


@final
class WholeBatchesAdapter(WrappedAdapter):
    """Yields every batch of a source; workers compare the first of each iteration."""

    def __init__(self, inner: Any, first_batches: FirstBatches) -> None:
        super().__init__(inner)
        self._first_batches = first_batches

    def get_torch_dataloader(self) -> Any:
        """Returns this object, over which Keras iterates once per epoch."""
        return self

    def __iter__(self) -> Iterator[Any]:
        return self._first_batches.recorded(iter(self._inner.get_torch_dataloader()))
