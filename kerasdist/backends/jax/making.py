"""How distributed values are made: of components, or by dividing a batch."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any, final

import jax
import numpy as np
from jax import numpy as jnp

from kerasdist.backends.jax import replica_scope, scopes
from kerasdist.backends.jax.arrays import is_array, is_traced, largest_of, padded
from kerasdist.backends.jax.layout import AXIS
from kerasdist.backends.jax.parcels import Packing
from kerasdist.backends.jax.placement import MeshPlacement
from kerasdist.backends.jax.sources import Own, Padded, Source, Stacked, is_distributed, joined
from kerasdist.errors import DisagreementError, UnsupportedError
from kerasdist.input.dividing import divided
from kerasdist.job.job import Job
from kerasdist.structures import flatten, map_leaves, pack, transpose
from kerasdist.values import DistributedValues, PerReplica

# What the leaves of most batches are.
_ARRAYS_ALONE = {np.ndarray}


class Maker(abc.ABC):
    """Makes distributed values, whose components lie on their replicas' devices."""

    def __init__(self, place: MeshPlacement) -> None:
        """Notes the devices.

        Args:
            place: The devices.
        """
        self._place = place
        self._replicas = place.layout.replicas

    @abc.abstractmethod
    def per_replica(self, values: Sequence[Any]) -> Any:
        """Returns a structure of values with the given components.

        Args:
            values: One structure a replica of this process.
        """

    @abc.abstractmethod
    def divide(self, batch: Any) -> Any:
        """Returns a structure of values whose components are consecutive pieces of a batch.

        Args:
            batch: Arrays with the examples along axis 0, in any structure; equal on all workers.
        """

    @abc.abstractmethod
    def entering(self, structure: Any) -> Any:
        """Returns arguments as a program takes them.

        Args:
            structure: A pytree, in which the user may have put values that nobody here has made.
        """

    def _joined(self, leaves: Sequence[Any]) -> Any:
        """Returns a value of components that are all here, or in the code of a program."""
        if not is_array(leaves[0]):
            return _of_objects(leaves)
        if replica_scope.current() is not None:
            return PerReplica(Own(jnp.stack(leaves)[jax.lax.axis_index(AXIS)], self._replicas))
        source = joined(PerReplica(tuple(leaves)), self._replicas)
        return PerReplica(tuple(leaves)) if source is None else PerReplica(source)


@final
class InProcess(Maker):
    """All replicas are in this process."""

    def __init__(self, place: MeshPlacement) -> None:
        """Notes the devices.

        Args:
            place: The devices.
        """
        super().__init__(place)
        self._packing = Packing(self._replicas, place.whole)

    def per_replica(self, values: Sequence[Any]) -> Any:
        """Puts components of equal shape into one array on all devices, in one transfer.

        On the CPU a program takes it from the host, for less.
        """
        value = transpose(values, self._joined)
        made = [leaf.source for leaf in flatten(value) if is_distributed(leaf)]
        self._settle([one for one in made if isinstance(one, Stacked | Padded)])
        return value

    def divide(self, batch: Any) -> Any:
        """Divides a batch; where that can be done evenly, small arrays of a type lie in one."""
        # Most batches are tuples of arrays, and a short step has little else to do.
        is_flat = type(batch) is tuple and set(map(type, batch)) == _ARRAYS_ALONE
        leaves = batch if is_flat else flatten(batch)
        # Where batches are placed ahead, nobody waits for that.
        parcels = None if self._place.places_ahead else self._packing.of(leaves)
        if parcels is None:
            return self.per_replica(divided(batch, self._replicas))
        values: list[Any] = [None] * len(leaves)
        for parcel in parcels:
            array = parcel.packed(leaves)
            for member, slot in zip(parcel.members, parcel.slots, strict=True):
                values[member] = PerReplica(Stacked.in_parcel(array, slot, self._place.pieces))
        return tuple(values) if is_flat else pack(batch, values)

    def entering(self, structure: Any) -> Any:
        """Returns the structure: a program finds out what there is to know by itself."""
        return structure

    def _settle(self, made: Sequence[Source]) -> None:
        """Sends arrays to the devices; on the CPU a program takes what is NumPy's."""
        made = [source for source in made if not is_traced(source.entering)]
        if not self._place.places_ahead:
            for source in made:
                if isinstance(source.entering, np.ndarray):
                    source.wait_on_host(self._place.pieces)
            made = [source for source in made if not isinstance(source.entering, np.ndarray)]
        if made:
            arrays = jax.device_put([source.array for source in made], self._place.pieces)
            for source, array in zip(made, arrays, strict=True):
                source.put(array)


@final
class AmongWorkers(Maker):
    """Each worker has some replicas, and brings in their components.

    A program must be the same everywhere, so each worker must know the shapes of all components.
    """

    def __init__(self, place: MeshPlacement, job: Job) -> None:
        """Notes the devices and the workers.

        Args:
            place: The devices.
            job: The job of this process.
        """
        super().__init__(place)
        self._job = job

    def per_replica(self, values: Sequence[Any]) -> Any:
        """Brings in components; the workers tell each other their shapes first."""
        if scopes.program() is not None and len(values) == self._replicas:
            return transpose(values, self._joined)
        columns: list[Sequence[Any]] = []

        def noted(leaves: Sequence[Any]) -> int:
            columns.append(leaves)
            return len(columns) - 1

        places = transpose(values, noted)
        made = self._made(columns, is_array)
        return map_leaves(lambda place: made[place], places)

    def divide(self, batch: Any) -> Any:
        """Brings in the pieces of the replicas here; the sizes of the others are known."""
        self._check_outside()

        def brought(leaves: Sequence[Any]) -> Any:
            here = [leaves[replica] for replica in self._place.layout.local_replicas]
            if not is_array(leaves[0]):
                return _of_objects(here)
            return PerReplica(self._source(here, [np.shape(leaf) for leaf in leaves]))

        return transpose(divided(batch, self._replicas), brought)

    def entering(self, structure: Any) -> Any:
        """Brings in the components of values that the user has made by hand."""
        leaves, form = jax.tree.flatten(structure, is_leaf=is_distributed)
        by_hand = [
            index
            for index, leaf in enumerate(leaves)
            if is_distributed(leaf) and not isinstance(leaf.source, Source)
        ]
        if not by_hand:
            return structure
        for index, value in zip(
            by_hand, self._made([leaves[i].values for i in by_hand], _is_number), strict=True
        ):
            leaves[index] = value
        return jax.tree.unflatten(form, leaves)

    def _made(
        self, columns: Sequence[Sequence[Any]], has_shape: Callable[[Any], bool]
    ) -> list[Any]:
        """Returns a value for each list of components, of which some have a shape."""
        self._check_outside()
        here = len(self._place.layout.local_replicas)
        wrong = [len(column) for column in columns if len(column) != here]
        if wrong:
            raise ValueError(
                f"[worker {self._job.rank}/{self._job.num_workers}] Expected a component for each "
                f"of the {here} replicas of this worker. Received: a value of {wrong[0]}. Make it "
                "with strategy.distribute_values_from_function."
            )
        shaped = [all(map(has_shape, column)) for column in columns]
        own = [
            [[list(np.shape(part)), str(jnp.result_type(part))] for part in column]
            for column, known in zip(columns, shaped, strict=True)
            if known
        ]
        everyone = self._job.exchange("components of a distributed value", own)
        if len(set(map(len, everyone))) > 1:
            raise DisagreementError(
                f"[worker {self._job.rank}/{self._job.num_workers}] Expected as many arrays from "
                f"all workers. Received: numbers of arrays={list(map(len, everyone))}, by worker. "
                "Make the same structure on every worker."
            )
        told = iter(zip(*everyone, strict=True))
        return [
            self._value(column, [tuple(part) for theirs in next(told) for part in theirs])
            if known
            else _of_objects(column)
            for column, known in zip(columns, shaped, strict=True)
        ]

    def _value(self, column: Sequence[Any], told: Sequence[tuple[Any, Any]]) -> DistributedValues:
        shapes = [tuple(shape) for shape, _ in told]
        if len({(len(shape), dtype) for shape, (_, dtype) in zip(shapes, told, strict=True)}) > 1:
            return PerReplica(tuple(column))
        return PerReplica(self._source(column, shapes))

    def _source(self, here: Sequence[Any], shapes: Sequence[tuple[int, ...]]) -> Source:
        """Returns components in one array, to which each worker contributes its own."""
        largest = largest_of(shapes) if shapes[0] else ()
        parts = [_own_copy(part, largest)[None] for part in here]
        array = jax.make_array_from_single_device_arrays(
            (self._replicas, *largest),
            self._place.pieces,
            jax.device_put(parts, list(self._place.layout.local)),
        )
        if len(set(shapes)) == 1:
            return Stacked(array, self._replicas)
        return Padded(array, tuple(shapes))

    def _check_outside(self) -> None:
        if scopes.program() is not None:
            raise UnsupportedError(
                "Expected distributed values to be made outside of strategy.run and of a "
                "kerasdist.function, where they have several workers: these run one program, and "
                "the values differ by worker. Received: a call in such a function. Make the value "
                "before, and give it as an argument."
            )


def _of_objects(leaves: Sequence[Any]) -> Any:
    """Returns a value of components that are no arrays; None is for all replicas."""
    first = leaves[0]
    same = all(leaf is first for leaf in leaves)
    alone = first is None or (same and is_distributed(first))
    return first if alone else PerReplica(tuple(leaves))


def _own_copy(part: Any, shape: tuple[int, ...]) -> Any:
    """Returns a component in a larger shape; on the CPU JAX may use NumPy's memory as it is."""
    if not isinstance(part, jax.Array):
        part = np.array(part)
    return part if part.shape == shape else padded(part, shape)


def _is_number(part: Any) -> bool:
    return is_array(part) or isinstance(part, bool | int | float)
