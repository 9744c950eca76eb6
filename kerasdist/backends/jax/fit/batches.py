"""Data adapters that place batches on the mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, final

import jax
import numpy as np

from kerasdist import keras_compat
from kerasdist.agreement.batches import FirstBatches
from kerasdist.backends.jax.mesh.arrays import padded
from kerasdist.backends.jax.mesh.placement import Placement
from kerasdist.backends.jax.mesh.worker_placement import WorkerPlacement
from kerasdist.errors import InputError
from kerasdist.input.autoshard import WorkerBatches
from kerasdist.input.fit_adapter import WrappedAdapter
from kerasdist.input.sharding import WorkerShard, arrays
from kerasdist.keras_compat import takes_rows


def placed(adapter: Any, place: Placement, first_batches: FirstBatches) -> Any:
    """Returns an adapter that places batches ahead of their step."""
    if isinstance(place, WorkerPlacement):
        if isinstance(adapter, WorkerBatches):
            own_batches = adapter.get_jax_iterator
            return _PlacedAdapter(
                adapter, lambda: (_of_all_workers(own, place) for own in own_batches())
            )
        if takes_rows(adapter):
            return _PlacedAdapter(adapter, partial(_own_rows, adapter, place))

    def batches() -> Iterator[Any]:
        return map(place.batch, first_batches.recorded(iter(adapter.get_jax_iterator())))

    return _PlacedAdapter(adapter, batches)


@final
class _PlacedAdapter(WrappedAdapter):
    """Yields batches whose transfer to the replicas' devices has started.

    Keras asks for each batch one step ahead and puts it on the default device. That does not move
    arrays that are on a mesh.
    """

    def __init__(self, inner: Any, batches: Callable[[], Iterator[Any]]) -> None:
        super().__init__(inner)
        self._batches = batches

    def get_jax_iterator(self) -> Iterator[Any]:
        """Returns the batches, on the replicas' devices."""
        return self._batches()


def _own_rows(adapter: Any, place: WorkerPlacement) -> Iterator[Any]:
    """Yields batches of arrays, from which each worker reads only its own replicas' rows."""
    for rows, total in keras_compat.jax_rows(adapter, place.chosen):
        yield place.chosen_rows(rows, total)


def _of_all_workers(own: WorkerShard, place: WorkerPlacement) -> Any:
    """Returns a global batch, made of the workers' own batches.

    If all replicas get equally many rows, each worker contributes its own. Otherwise every worker
    gets the whole batch, as any batch that cannot be divided evenly.
    """
    if not own.alike:
        raise InputError(
            "Expected batches that differ by worker in nothing but their number of examples: "
            "on JAX the workers run one program. Received: shapes="
            f"{[tuple(leaf.shape) for leaf in arrays(own.rows)]} on worker {own.rank}, and "
            "others on other workers. Pad the examples to one shape."
        )
    leaves = jax.tree.leaves(own.rows)
    equal = len(set(own.sizes)) == 1 and own.total % place.layout.replicas == 0
    if equal and all(np.ndim(leaf) > 0 for leaf in leaves):
        return place.chosen_rows(jax.tree.map(np.array, own.rows), own.total)
    return place.batch(jax.tree.map(lambda leaf: _rows_of_all(leaf, own, place), own.rows))


def _rows_of_all(leaf: Any, own: WorkerShard, place: WorkerPlacement) -> Any:
    """Returns the rows of all workers, concatenated on the host."""
    if np.ndim(leaf) == 0:
        return leaf
    here = len(place.layout.local_replicas)
    each = here * -(-max(own.sizes) // here)
    received = place.rows_of_all(padded(np.asarray(leaf), (each, *leaf.shape[1:])))
    parts = [received[rank * each :][:size] for rank, size in enumerate(own.sizes)]
    return np.concatenate(parts)
