"""What a worker reads: of arrays its own rows alone, of other sources every batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, final

from kerasdist import keras_seam
from kerasdist.backends.first_batches import FirstBatches
from kerasdist.input.adapter import WrappedAdapter
from kerasdist.input.shares import OwnNumbers


@final
class OwnRowsAdapter(WrappedAdapter):
    """Yields this worker's rows of each batch; of one that is not divided, all rows."""

    def __init__(self, inner: Any, replicas: int, own: range) -> None:
        """Wraps an adapter.

        Args:
            inner: Keras's adapter of arrays.
            replicas: How many replicas there are on all workers.
            own: This worker's own.
        """
        super().__init__(inner)
        self._own = OwnNumbers(replicas, own)

    def get_torch_dataloader(self) -> Any:
        """Returns the batches, to be iterated again and again."""
        return self

    def __iter__(self) -> Iterator[Any]:
        own = self._own
        return (own.batch(rows, total) for rows, total in keras_seam.torch_rows(self._inner, own))


@final
class WholeBatchesAdapter(WrappedAdapter):
    """Yields every batch of a source; workers compare the first of each iteration."""

    def __init__(self, inner: Any, first_batches: FirstBatches) -> None:
        """Wraps an adapter.

        Args:
            inner: Keras's adapter of a source that is read batch by batch.
            first_batches: Where other workers' are compared with this one's.
        """
        super().__init__(inner)
        self._first_batches = first_batches

    def get_torch_dataloader(self) -> Any:
        """Returns the batches, to be iterated again and again."""
        return self

    def __iter__(self) -> Iterator[Any]:
        return self._first_batches.noted(iter(self._inner.get_torch_dataloader()))
