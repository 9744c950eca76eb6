"""Data adapters that place batches on the mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, final

import jax
import keras
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
    """Returns an adapter that places batches before their step begins, if that saves time."""
    if not place.places_ahead:
        return _PlacedAdapter(adapter, place, adapter.get_jax_iterator)
    if isinstance(place, WorkerPlacement):
        if isinstance(adapter, WorkerBatches):
            own_batches = adapter.get_jax_iterator
            return _PlacedAdapter(
                adapter, place, lambda: (_of_all_workers(own, place) for own in own_batches())
            )
        if takes_rows(adapter):
            return _PlacedAdapter(adapter, place, partial(_own_rows, adapter, place))

    def batches() -> Iterator[Any]:
        return map(place.batch, first_batches.recorded(iter(adapter.get_jax_iterator())))

    return _PlacedAdapter(adapter, place, batches)


@final
class _Placed:
    """Wraps a global array that is already on the mesh, so that Keras's loop does not move it.

    Keras calls ``jax.device_put`` for each array that it reads ahead, but JAX refuses that for an
    array of several processes. To JAX an object of this class is a pytree without arrays.
    """

    def __init__(self, array: jax.Array) -> None:
        self.array = array
        self.shape, self.dtype = array.shape, array.dtype  # Keras builds the model from these


jax.tree_util.register_pytree_node(_Placed, lambda one: ((), one), lambda one, _: one)


def _held(batch: object) -> Any:
    return keras.tree.map_structure(
        lambda leaf: _Placed(leaf) if isinstance(leaf, jax.Array) else leaf, batch
    )


def take(batch: object) -> Any:
    """Returns a batch with its arrays, from a batch that Keras's loop has passed on wrapped."""
    return keras.tree.map_structure(
        lambda leaf: leaf.array if isinstance(leaf, _Placed) else leaf, batch
    )


@final
class _PlacedAdapter(WrappedAdapter):
    """Yields batches whose transfer to the replicas' devices has already started.

    Keras asks for each batch one step ahead, and puts it on the default device; arrays that are on
    a mesh stay there. Since version 3.16 Keras asks for stacks of batches if an execution has
    several steps. This adapter yields single batches nevertheless, because `StepFunction` itself
    stacks them.
    """

    def __init__(
        self, inner: Any, place: Placement, batches: Callable[[], Iterable[object]]
    ) -> None:
        super().__init__(inner)
        self._place = place
        self._batches = batches

    def get_jax_iterator(self, super_batch: int | None = None) -> Iterator[object]:
        """Returns single batches, on the replicas' devices."""
        if isinstance(self._place, WorkerPlacement):
            return map(_held, self._batches())
        if super_batch is None:
            return iter(self._batches())
        # Keras turns batches into JAX's arrays, which may share memory that the source overwrites.
        return map(self._place.copy_batch, self._batches())


def _own_rows(adapter: Any, place: WorkerPlacement) -> Iterator[Any]:
    """Yields batches from arrays; each worker reads only the rows of its own replicas."""
    for rows, total in keras_compat.jax_rows(adapter, place.chosen):
        yield place.chosen_rows(rows, total)


def _of_all_workers(own: WorkerShard, place: WorkerPlacement) -> Any:
    """Returns a global batch that consists of the workers' own batches.

    If all replicas get the same number of rows, each worker contributes its own rows. Otherwise
    every worker gets the whole batch, like any batch that cannot be divided evenly.
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
