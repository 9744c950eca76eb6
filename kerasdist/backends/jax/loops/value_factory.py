"""Makes distributed values from components, or by dividing a batch."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any, final

import jax
import numpy as np
from jax import numpy as jnp

from kerasdist.api.values import DistributedValues, PerReplica
from kerasdist.backends.jax.loops import replica_scope, scopes
from kerasdist.backends.jax.loops.values import Own, Padded, Source, Stacked, is_distributed, joined
from kerasdist.backends.jax.mesh.arrays import is_array, is_traced, largest_of, padded
from kerasdist.backends.jax.mesh.layout import AXIS
from kerasdist.backends.jax.mesh.placement import MeshPlacement
from kerasdist.core.structures import flatten, map_leaves, pack, transpose
from kerasdist.errors import DisagreementError, UnsupportedError
from kerasdist.input.sharding import examples, split_batch
from kerasdist.job.job import Job


class Maker(abc.ABC):
    """Makes distributed values, whose components lie on their replicas' devices."""

    def __init__(self, place: MeshPlacement) -> None:
        self._place = place
        self._replicas = place.layout.replicas

    @abc.abstractmethod
    def per_replica(self, values: Sequence[Any]) -> Any:
        """Returns a structure of values with the given components."""

    @abc.abstractmethod
    def divide(self, batch: Any) -> Any:
        """Returns a structure of values whose components are consecutive pieces of a batch."""

    @abc.abstractmethod
    def entering(self, structure: Any) -> Any:
        """Returns a program's arguments, with the components of all workers' replicas."""

    def _sent(self, make: Callable[[], list[Any]]) -> list[Any]:
        """Returns arrays that a function puts on the devices, even inside of a program."""
        with jax.ensure_compile_time_eval():  # the arrays outlive a program that is being traced
            return self._place.sent(make())

    def _source(self, here: Sequence[Any], shapes: Sequence[tuple[int, ...]]) -> Source:
        """Returns components in one array, to which this process contributes its own."""
        layout = self._place.layout
        largest = largest_of(shapes) if shapes[0] else ()
        parts = [_padded(self._place.lasting(part), largest)[None] for part in here]
        parts = layout.by_device(parts)
        whole = self._replicas, *largest
        [array] = self._sent(
            lambda: [
                jax.make_array_from_single_device_arrays(
                    whole, self._place.pieces, jax.device_put(parts, list(layout.local))
                )
            ]
        )
        if len(set(shapes)) == 1:
            return Stacked(array, self._replicas)
        return Padded(array, tuple(shapes))

    def _joined(self, leaves: Sequence[Any]) -> Any:
        """Returns a value of all replicas' components, which this process holds or traces."""
        if not is_array(leaves[0]):
            return _of_objects(leaves)
        if replica_scope.current() is not None:
            return PerReplica(Own(jnp.stack(leaves)[jax.lax.axis_index(AXIS)], self._replicas))
        source = joined(PerReplica(tuple(leaves)), self._replicas)
        return PerReplica(tuple(leaves)) if source is None else PerReplica(source)


@final
class InProcess(Maker):
    """Makes values where all replicas are in this process."""

    def per_replica(self, values: Sequence[Any]) -> Any:
        """Puts components of equal shape into one array on all devices, in one transfer."""
        value = transpose(values, self._of_process)
        sources = [leaf.source for leaf in flatten(value) if is_distributed(leaf)]
        made = [one for one in sources if isinstance(one, Stacked | Padded)]
        made = [source for source in made if not is_traced(source.array)]
        arrays = self._sent(
            lambda: jax.device_put([source.array for source in made], self._place.pieces)
        )
        for source, array in zip(made, arrays, strict=True):
            source.array = array
        return value

    def _of_process(self, leaves: Sequence[Any]) -> Any:
        """Returns a value from components; on accelerators without stacking them on the host."""
        stacks = self._place.shares_memory or replica_scope.current() is not None
        if stacks or not all(isinstance(leaf, np.ndarray) for leaf in leaves):
            return self._joined(leaves)
        if len({(leaf.ndim, leaf.dtype) for leaf in leaves}) > 1:
            return self._joined(leaves)
        return PerReplica(self._source(leaves, [leaf.shape for leaf in leaves]))

    def divide(self, batch: Any) -> Any:
        """Cuts a batch, and puts the pieces on the devices."""
        rows, leaves = examples(batch), flatten(batch)
        alike = rows and not rows % self._replicas and replica_scope.current() is None
        if not alike or not all(isinstance(leaf, np.ndarray) and leaf.ndim for leaf in leaves):
            return self.per_replica(split_batch(batch, self._replicas))
        # Pieces of equal size are contiguous already.
        shape = self._replicas, rows // self._replicas
        stacks = [self._place.lasting(leaf).reshape(*shape, *leaf.shape[1:]) for leaf in leaves]
        pieces = self._place.pieces
        if not self._place.shares_memory:
            stacks = self._sent(lambda: jax.device_put(stacks, pieces))
        # On the CPU the step takes them from NumPy, which is faster.
        return pack(batch, [PerReplica(Stacked(one, self._replicas, pieces)) for one in stacks])

    def entering(self, structure: Any) -> Any:
        """Returns the structure unchanged: there are no other workers to ask for shapes."""
        return structure


@final
class AmongWorkers(Maker):
    """Makes values of several workers, each of which contributes its own replicas' components.

    All workers run the same program, so each of them must know the shapes of all components.
    """

    def __init__(self, place: MeshPlacement, job: Job) -> None:
        super().__init__(place)
        self._job = job

    def per_replica(self, values: Sequence[Any]) -> Any:
        """Makes values of all workers' components; the workers exchange the shapes first."""
        if scopes.program() is not None and len(values) == self._replicas:
            return transpose(values, self._joined)
        columns: list[Sequence[Any]] = []

        def column(leaves: Sequence[Any]) -> int:
            columns.append(leaves)
            return len(columns) - 1

        places = transpose(values, column)
        made = self._made(columns, is_array)
        return map_leaves(lambda place: made[place], places)

    def divide(self, batch: Any) -> Any:
        """Contributes the pieces of this worker's replicas; it knows the sizes of the others."""
        self._check_outside()

        def brought(leaves: Sequence[Any]) -> Any:
            here = [leaves[replica] for replica in self._place.layout.local_replicas]
            if not is_array(leaves[0]):
                return _of_objects(here)
            return PerReplica(self._source(here, [np.shape(leaf) for leaf in leaves]))

        return transpose(split_batch(batch, self._replicas), brought)

    def entering(self, structure: Any) -> Any:
        """Returns a structure whose distributed values, if made by hand, are global arrays."""
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
        """Makes one value per column of this worker's components; workers exchange the shapes."""
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
        everyone = self._job.all_gather_object("components of a distributed value", own)
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

    def _check_outside(self) -> None:
        if scopes.program() is not None:
            raise UnsupportedError(
                "Expected distributed values to be made outside of strategy.run and of a "
                "kerasdist.function, where they have several workers: these run one program, and "
                "the values differ by worker. Received: a call in such a function. Make the value "
                "before, and give it as an argument."
            )


def _of_objects(leaves: Sequence[Any]) -> Any:
    """Returns a value from components that are not arrays, or just None if they are None."""
    first = leaves[0]
    same = all(leaf is first for leaf in leaves)
    alone = first is None or (same and is_distributed(first))
    return first if alone else PerReplica(tuple(leaves))


def _padded(part: Any, shape: tuple[int, ...]) -> Any:
    if not isinstance(part, jax.Array):
        part = np.asarray(part)
    return part if part.shape == shape else padded(part, shape)


def _is_number(part: Any) -> bool:
    return is_array(part) or isinstance(part, bool | int | float)
