"""Data adapters that place batches on the mesh."""

from __future__ import annotations

from collections.abc import Iterator
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


@final
class _Placed:
    """Wraps a global array that is already on the mesh, so that Keras's loop does not move it.

    Keras calls ``jax.device_put`` for each array that it reads ahead, but JAX refuses this call for
    an array of several processes. JAX treats an object of this class as a pytree without arrays, so
    ``jax.device_put`` returns the object unchanged.
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
    """Unwraps the arrays in a batch that Keras's loop passes to a step; returns the batch."""
    return keras.tree.map_structure(
        lambda leaf: leaf.array if isinstance(leaf, _Placed) else leaf, batch
    )


@final
class PlacedAdapter(WrappedAdapter):
    """Yields single batches, whose transfer to accelerators has already started.

    Keras asks for each batch one step ahead, and puts the batch's arrays on the default device,
    except arrays that are already on a mesh. Since version 3.16 Keras asks for stacks of batches if
    an execution has several steps. This adapter yields single batches nevertheless, because
    `StepFunction` itself stacks them.
    """

    def __init__(self, inner: Any, place: Placement, first_batches: FirstBatches) -> None:
        super().__init__(inner)
        self._place = place
        self._first_batches = first_batches

    def get_jax_iterator(self, super_batch: int | None = None) -> Iterator[object]:
        """Returns an iterator over single batches, even if Keras asks for stacks of batches."""
        if isinstance(self._place, WorkerPlacement):
            return map(_held, self._of_workers(self._place))
        if self._place.places_ahead:
            return self._global_batches()
        batches = iter(self._inner.get_jax_iterator())
        # Keras turns batches into JAX's arrays. Without a copy, these may share memory that the
        # data source overwrites for the next batch.
        return batches if super_batch is None else map(self._place.copy_batch, batches)

    def _global_batches(self) -> Iterator[object]:
        batches = self._first_batches.recorded(iter(self._inner.get_jax_iterator()))
        return map(self._place.batch, batches)

    def _of_workers(self, place: WorkerPlacement) -> Iterator[object]:
        """Returns global batches; if possible, each worker reads only the rows of its replicas."""
        if isinstance(self._inner, WorkerBatches):
            return (_of_all_workers(own, place) for own in self._inner.get_jax_iterator())
        if takes_rows(self._inner):
            own_rows = keras_compat.jax_rows(self._inner, place.chosen)
            return (place.chosen_rows(rows, total) for rows, total in own_rows)
        return self._global_batches()


def _of_all_workers(own: WorkerShard, place: WorkerPlacement) -> Any:
    """Returns a global batch that consists of the workers' own batches.

    If all replicas get the same number of rows, each worker contributes its own rows. Otherwise
    every worker gets the rows of all workers, as if it had read the whole batch itself.
    """
    if not own.alike:
        raise InputError(
            "Expected batches that differ by worker in nothing but their number of examples: "
            "on JAX the workers run one program. Received: shapes="
            f"{[tuple(leaf.shape) for leaf in arrays(own.rows)]} on worker {own.rank}, and "
            "other shapes on other workers. Pad the examples to one shape."
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
