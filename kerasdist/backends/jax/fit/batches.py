"""Data adapters that place batches on the mesh."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, final

import jax
import numpy as np

from kerasdist import keras_compat
from kerasdist.agreement.batches import FirstBatches
from kerasdist.backends.jax.mesh.placement import Placement
from kerasdist.backends.jax.mesh.worker_placement import WorkerPlacement
from kerasdist.errors import InputError
from kerasdist.input.fit_adapter import WrappedAdapter
from kerasdist.input.sharding import WorkerShard, arrays
from kerasdist.input.worker_batches import ShardedAdapter
from kerasdist.keras_compat import has_sparse, is_array_adapter


def placed(adapter: object, place: Placement, first_batches: FirstBatches) -> Any:
    """Returns an adapter that places batches ahead of their step."""
    if isinstance(place, WorkerPlacement):
        if isinstance(adapter, ShardedAdapter):
            return _OwnBatchesAdapter(adapter, place)
        if is_array_adapter(adapter) and not has_sparse(adapter):
            return _OwnRowsAdapter(adapter, place)
    return _PlacedAdapter(adapter, place, first_batches)


@final
class _PlacedAdapter(WrappedAdapter):
    """Yields batches whose transfer to the replicas' devices has started.

    Keras asks for each batch one step ahead and puts it on the default device. That does not move
    arrays that are on a mesh.
    """

    def __init__(self, inner: Any, place: Placement, first_batches: FirstBatches) -> None:
        super().__init__(inner)
        self._place = place
        self._first_batches = first_batches

    def get_jax_iterator(self) -> Iterator[Any]:
        """Returns the batches, on the replicas' devices."""
        batches = iter(self._inner.get_jax_iterator())
        return map(self._place.batch, self._first_batches.recorded(batches))


@final
class _OwnRowsAdapter(WrappedAdapter):
    """Yields batches of arrays, from which each worker reads only its own replicas' rows."""

    def __init__(self, inner: Any, place: WorkerPlacement) -> None:
        super().__init__(inner)
        self._place = place

    def get_jax_iterator(self) -> Iterator[Any]:
        """Returns the batches, on the replicas' devices."""
        for rows, total in keras_compat.jax_rows(self._inner, self._place.chosen):
            yield self._place.chosen_rows(rows, total)


@final
class _OwnBatchesAdapter(WrappedAdapter):
    """Yields global batches, made of the workers' own batches, on the replicas' devices.

    If all replicas get equally many rows, each worker contributes its own. Otherwise every worker
    gets the whole batch, as any batch that cannot be divided evenly.
    """

    def __init__(self, inner: Any, place: WorkerPlacement) -> None:
        super().__init__(inner)
        self._place = place
        self._layout = place.layout

    def get_jax_iterator(self) -> Iterator[Any]:
        """Returns the batches, on the replicas' devices."""
        return map(self._placed, self._inner.get_jax_iterator())

    def _placed(self, own: WorkerShard) -> Any:
        if not own.alike:
            raise InputError(
                "Expected batches that differ by worker in nothing but their number of examples: "
                "on JAX the workers run one program. Received: shapes="
                f"{[tuple(leaf.shape) for leaf in arrays(own.rows)]} on worker {own.rank}, and "
                "others on other workers. Pad the examples to one shape."
            )
        leaves = jax.tree.leaves(own.rows)
        equal = len(set(own.sizes)) == 1 and own.total % self._layout.replicas == 0
        if equal and all(np.ndim(leaf) > 0 for leaf in leaves):
            return self._place.chosen_rows(jax.tree.map(np.array, own.rows), own.total)
        return self._place.batch(jax.tree.map(lambda leaf: self._of_all(leaf, own), own.rows))

    def _of_all(self, leaf: Any, own: WorkerShard) -> Any:
        """Returns the rows of all workers, concatenated on the host."""
        if np.ndim(leaf) == 0:
            return leaf
        leaf = np.asarray(leaf)
        here = len(self._layout.local_replicas)
        each = here * -(-max(own.sizes) // here)
        padded = np.zeros((each, *leaf.shape[1:]), leaf.dtype)
        padded[: own.size] = leaf
        received = self._place.rows_of_all(padded)
        parts = [received[rank * each :][:size] for rank, size in enumerate(own.sizes)]
        return np.concatenate(parts)
