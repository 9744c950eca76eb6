"""How batches reach the mesh."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, final

from kerasdist.backends.jax.placement import Placement
from kerasdist.input.adapter import WrappedAdapter


@final
class PlacedAdapter(WrappedAdapter):
    """Yields batches that are on their way to the replicas' devices already.

    Keras asks for each batch one step ahead and puts it on the default device, which leaves alone
    what is on a mesh.
    """

    def __init__(self, inner: Any, arrays: Placement) -> None:
        """Wraps an adapter.

        Args:
            inner: The adapter that Keras made for the data of the call.
            arrays: Where batches belong.
        """
        super().__init__(inner)
        self._arrays = arrays

    def get_jax_iterator(self) -> Iterator[Any]:
        """Returns the batches, on the replicas' devices."""
        return map(self._arrays.batch, self._inner.get_jax_iterator())
