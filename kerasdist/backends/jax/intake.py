"""How batches get onto the mesh."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any, final

import jax
import numpy as np
from jax.sharding import NamedSharding

from kerasdist.backends.jax.layout import Layout
from kerasdist.backends.jax.rest import OnWorker, is_placed

_assembled = jax.make_array_from_single_device_arrays


class Intake(abc.ABC):
    """Brings batches onto the mesh.

    Attributes:
        places_ahead: Whether to move a batch while the step before it still runs.
    """

    places_ahead: bool

    @abc.abstractmethod
    def batch(self, batch: Any, axis: int) -> Any:
        """Returns a global batch as a compiled step takes it.

        Args:
            batch: A pytree of arrays, JAX's or NumPy's.
            axis: The axis of the examples.
        """

    @abc.abstractmethod
    def spread(self, stack: Any) -> Any:
        """Gives each replica its element of an array that this process has whole.

        Args:
            stack: An array with an element a replica along its first axis.
        """

    @abc.abstractmethod
    def argument(self, array: Any) -> Any:
        """Returns a user's argument as a program takes it.

        Args:
            array: An array, JAX's or NumPy's.
        """

    @abc.abstractmethod
    def whole(self, array: Any) -> Any:
        """Returns an array that is whole on every device.

        Args:
            array: An array of this process.
        """


@final
class OfProcess(Intake):
    """All devices are this process's, and JAX divides the batch."""

    def __init__(self, layout: Layout) -> None:
        """Notes the mesh.

        Args:
            layout: The devices.
        """
        self._layout = layout
        self.places_ahead = layout.local[0].platform != "cpu"

    def batch(self, batch: Any, axis: int) -> Any:
        """Sends each accelerator its rows; on the CPU the step takes them from NumPy, for less."""
        leaves = jax.tree.leaves(batch)
        if not self.places_ahead and not any_committed(leaves):
            return batch
        sharding = self._layout.entry(leaves, axis)
        if all(is_placed(leaf, sharding) for leaf in leaves):
            return batch
        return jax.device_put(batch, sharding)

    def spread(self, stack: Any) -> Any:
        """Sends each device its element."""
        return jax.device_put(stack, self._layout.rows[0])

    def argument(self, array: Any) -> Any:
        """Moves what is bound elsewhere; JAX moves the others."""
        if type(array) is np.ndarray or not isinstance(array, jax.Array) or not array.committed:
            return array
        if array.sharding in (self._layout.whole, self._layout.rows[0]):
            return array
        return self.whole(array)

    def whole(self, array: Any) -> Any:
        """Sends it to each device."""
        return jax.device_put(array, self._layout.whole)


@final
class OfWorkers(Intake):
    """Each worker has the same batch, and brings in the rows of its own replicas."""

    places_ahead = True

    def __init__(self, layout: Layout, rest: OnWorker) -> None:
        """Notes the mesh.

        Args:
            layout: The devices.
            rest: How an array lies that is whole on the devices of this process.
        """
        self._layout = layout
        self._rest = rest

    def batch(self, batch: Any, axis: int) -> Any:
        """Brings in the rows of the replicas here; all rows, if they cannot be divided evenly."""
        leaves = jax.tree.leaves(batch)
        target = self._layout.entry(leaves, axis)
        if all(is_placed(leaf, target) for leaf in leaves):
            return batch
        if target is self._layout.whole:
            return jax.tree.map(self.whole, batch)
        return jax.tree.map(lambda leaf: self._rows(leaf, target, axis), batch)

    def spread(self, stack: Any) -> Any:
        """Sends each device here its element."""
        return self._rows(stack, self._layout.rows[0], axis=0)

    def argument(self, array: Any) -> Any:
        """Brings in each worker's own; what a program has returned is there already."""
        if isinstance(array, jax.Array) and not array.is_fully_addressable:
            return array
        return self.whole(array)

    def whole(self, array: Any) -> Any:
        """Brings in each worker's own, for its devices; they should be equal."""
        return self._assembled_whole(_own_copy(array))

    def chosen(self, numbers: Any) -> Any:
        """Returns which rows of a batch this worker brings in.

        Args:
            numbers: The rows' numbers.
        """
        share, rest = divmod(len(numbers), self._layout.replicas)
        here = self._layout.local_replicas
        return numbers if rest else numbers[here.start * share : here.stop * share]

    def chosen_rows(self, batch: Any, total: int) -> Any:
        """Returns a batch as a compiled step takes it.

        Args:
            batch: A pytree of arrays of its chosen rows, that nobody else will change.
            total: How many rows it has on all workers.
        """
        if total % self._layout.replicas:
            return jax.tree.map(self._assembled_whole, batch)
        target = self._layout.rows[0]

        def assembled(leaf: Any) -> Any:
            share = leaf.shape[0] // len(self._layout.local)
            parts = [leaf[i * share : (i + 1) * share] for i in range(len(self._layout.local))]
            return self._joined(parts, (total, *leaf.shape[1:]), target)

        return jax.tree.map(assembled, batch)

    def _assembled_whole(self, leaf: Any) -> Any:
        here = jax.device_put(leaf, self._rest.whole)
        [entered] = self._rest.entered([here], [self._layout.whole])
        return entered

    def _rows(self, leaf: Any, target: NamedSharding, axis: int) -> Any:
        """Returns an array of all rows, of which those of the replicas here are brought in."""
        here, share = self._layout.local_replicas, leaf.shape[axis] // self._layout.replicas
        before = (slice(None),) * axis
        parts = [
            _own_copy(leaf[(*before, slice(replica * share, (replica + 1) * share))])
            for replica in here
        ]
        return self._joined(parts, leaf.shape, target)

    def _joined(self, parts: list[Any], shape: Any, target: NamedSharding) -> Any:
        return _assembled(shape, target, jax.device_put(parts, list(self._layout.local)))


def any_committed(leaves: Sequence[Any]) -> bool:
    """Whether a JAX array was bound to its device by somebody; JAX moves the others by itself.

    Args:
        leaves: Anything.
    """
    return any(isinstance(leaf, jax.Array) and leaf.committed for leaf in leaves)


def _own_copy(rows: Any) -> Any:
    """Copies rows on the host: on the CPU JAX may use NumPy's memory, which the user fills anew."""
    return rows if isinstance(rows, jax.Array) else np.array(rows)
