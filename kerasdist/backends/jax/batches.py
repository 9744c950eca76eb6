"""How batches reach the mesh."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, final

from kerasdist import keras_seam
from kerasdist.backends.first_batches import FirstBatches
from kerasdist.backends.jax.intake import OfWorkers
from kerasdist.backends.jax.placement import Placement
from kerasdist.input.adapter import WrappedAdapter


@final
class PlacedAdapter(WrappedAdapter):
    """Yields batches that are on their way to the replicas' devices already.

    Keras asks for each batch one step ahead and puts it on the default device, which leaves alone
    what is on a mesh.
    """

    def __init__(self, inner: Any, arrays: Placement, first_batches: FirstBatches) -> None:
        """Wraps an adapter.

        Args:
            inner: The adapter that Keras made for the data of the call.
            arrays: Where batches belong.
            first_batches: Where other workers' are compared with this one's.
        """
        super().__init__(inner)
        self._arrays = arrays
        self._first_batches = first_batches

    def get_jax_iterator(self) -> Iterator[Any]:
        """Returns the batches, on the replicas' devices."""
        batches = iter(self._inner.get_jax_iterator())
        return map(self._arrays.batch, self._first_batches.noted(batches))


@final
class OwnRowsAdapter(WrappedAdapter):
    """Yields batches of arrays, of which each worker has taken its own replicas' rows alone."""

    def __init__(self, inner: Any, intake: OfWorkers) -> None:
        """Wraps an adapter.

        Args:
            inner: The adapter that Keras made for the arrays of the call.
            intake: Says which rows, and brings them in.
        """
        super().__init__(inner)
        self._intake = intake

    def get_jax_iterator(self) -> Iterator[Any]:
        """Returns the batches, on the replicas' devices."""
        for rows, total in keras_seam.jax_rows(self._inner, self._intake.chosen):
            yield self._intake.chosen_rows(rows, total)
