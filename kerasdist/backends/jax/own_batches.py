"""Batches of which each worker has read its own rows, and not the others'."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any, final

import jax
import numpy as np

from kerasdist.backends.jax.intake import OfWorkers
from kerasdist.backends.jax.layout import Layout
from kerasdist.errors import InputError
from kerasdist.input.adapter import WrappedAdapter
from kerasdist.input.dividing import arrays
from kerasdist.input.shares import WorkerRows


@final
class OwnBatchesAdapter(WrappedAdapter):
    """Yields the global batches that the workers' own batches make, on the replicas' devices.

    Where the workers have as many rows, each brings in its own. Otherwise all of them get the whole
    batch, which then enters a step as any batch that cannot be divided evenly.
    """

    def __init__(self, inner: Any, layout: Layout, intake: OfWorkers) -> None:
        """Wraps an adapter.

        Args:
            inner: The adapter of the worker's batches.
            layout: The devices.
            intake: Brings batches onto them.
        """
        super().__init__(inner)
        self._layout = layout
        self._intake = intake

    def get_jax_iterator(self) -> Iterator[Any]:
        """Returns the batches."""
        return map(self._placed, self._inner.get_jax_iterator())

    def _placed(self, own: WorkerRows) -> Any:
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
            return self._intake.chosen_rows(jax.tree.map(np.array, own.rows), own.total)
        return self._intake.batch(jax.tree.map(lambda leaf: self._of_all(leaf, own), own.rows), 0)

    def _of_all(self, leaf: Any, own: WorkerRows) -> Any:
        """The rows of all workers, one after another, on the host."""
        if np.ndim(leaf) == 0:
            return leaf
        leaf = np.asarray(leaf)
        here = len(self._layout.local_replicas)
        each = here * -(-max(own.sizes) // here)
        padded = np.zeros((each, *leaf.shape[1:]), leaf.dtype)
        padded[: own.size] = leaf
        everyone = self._whole(self._intake.chosen_rows(padded, each * len(own.sizes)))
        received = np.asarray(everyone.addressable_data(0))
        parts = [received[rank * each :][:size] for rank, size in enumerate(own.sizes)]
        return np.concatenate(parts)

    @cached_property
    def _whole(self) -> Any:
        return jax.jit(lambda array: array, out_shardings=self._layout.whole)
