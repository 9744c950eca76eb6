"""Makes distributed values from components, or by dividing a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import jax
import numpy as np
from jax import numpy as jnp

from kerasdist.api.values import PerReplica
from kerasdist.backends.jax.loops import replica_scope, scopes
from kerasdist.backends.jax.loops.values import (
    Own,
    Source,
    flatten,
    is_distributed,
    is_number,
    joined,
    stacked,
)
from kerasdist.backends.jax.mesh.arrays import is_array, largest_of, padded
from kerasdist.backends.jax.mesh.layout import AXIS
from kerasdist.backends.jax.mesh.placement import Placement
from kerasdist.core.structures import map_leaves, pack, transpose
from kerasdist.errors import DisagreementError, UnsupportedError
from kerasdist.input.sharding import bounds_of_replicas, examples, rows
from kerasdist.job.job import Job


@final
class Maker:
    """Makes distributed values, whose components lie on their replicas' devices.

    Each worker contributes its own replicas' components. All workers run the same program, so each
    of them must know the shapes of all components.
    """

    def __init__(self, place: Placement, job: Job | None) -> None:
        self._place = place
        self._replicas = place.layout.replicas
        self._job = job

    def per_replica(self, values: Sequence[Any]) -> Any:
        """Returns a structure of values with the given components."""
        all_here = self._job is None or len(values) == self._replicas
        if scopes.program() is not None and all_here:
            return transpose(values, self._joined)
        columns: list[Sequence[Any]] = []
        transpose(values, columns.append)
        return self._place.sent(pack(values[0], self._made(columns, is_array)))

    def divide(self, batch: Any) -> Any:
        """Returns a structure of values whose components are consecutive parts of a batch."""
        bounds = bounds_of_replicas(examples(batch), self._replicas)
        if scopes.program() is not None and self._job is None:
            return transpose([rows(batch, *each) for each in bounds], self._joined)
        self._check_outside()
        here = self._place.layout.local_replicas

        def divide(leaf: Any) -> Any:
            parts = [rows(leaf, *each) for each in bounds[here.start : here.stop]]
            if not is_array(leaf):
                return _of_objects(parts)
            sizes = [(end - begin,) if leaf.ndim else () for begin, end in bounds]
            return PerReplica(self._source(parts, [size + leaf.shape[1:] for size in sizes]))

        return self._place.sent(map_leaves(divide, batch))

    def _source(self, here: Sequence[Any], shapes: Sequence[tuple[int, ...]]) -> Source:
        """Returns components in one array, to which this process contributes its own."""
        largest = largest_of(shapes) if shapes[0] else ()
        parts = [padded(self._place.lasting(part), largest)[None] for part in here]
        with jax.ensure_compile_time_eval():  # the array outlives a program that is being traced
            array = self._place.assemble(parts, (self._replicas, *largest))
        return stacked(array, shapes)

    def _joined(self, leaves: Sequence[Any]) -> Any:
        """Returns a value of all replicas' components, which this process holds or traces."""
        if not is_array(leaves[0]):
            return _of_objects(leaves)
        if replica_scope.current() is not None:
            return PerReplica(Own(jnp.stack(leaves)[jax.lax.axis_index(AXIS)], self._replicas))
        source = joined(PerReplica(tuple(leaves)), self._replicas)
        return PerReplica(tuple(leaves)) if source is None else PerReplica(source)

    def entering(self, structure: Any) -> Any:
        """Returns a program's arguments, with the components of all workers' replicas."""
        if self._job is None:
            return structure
        leaves, form = flatten(structure)
        by_hand = [
            index
            for index, leaf in enumerate(leaves)
            if is_distributed(leaf) and not isinstance(leaf.source, Source)
        ]
        if not by_hand:
            return structure
        for index, value in zip(
            by_hand, self._made([leaves[i].values for i in by_hand], is_number), strict=True
        ):
            leaves[index] = value
        return jax.tree.unflatten(form, leaves)

    def _made(
        self, columns: Sequence[Sequence[Any]], has_shape: Callable[[Any], bool]
    ) -> list[Any]:
        """Makes one value per column of this worker's components; workers exchange the shapes."""
        self._check_outside()
        here = len(self._place.layout.local_replicas)
        who = "" if self._job is None else f"[worker {self._job.rank}/{self._job.num_workers}] "
        wrong = [len(column) for column in columns if len(column) != here]
        if wrong:
            raise ValueError(
                f"{who}Expected a component for each "
                f"of the {here} replicas of this worker. Received: a value of {wrong[0]}. Make it "
                "with strategy.distribute_values_from_function."
            )
        shaped = [all(map(has_shape, column)) for column in columns]
        own = [
            [[list(np.shape(part)), str(jnp.result_type(part))] for part in column]
            for column, known in zip(columns, shaped, strict=True)
            if known
        ]
        everyone = [own]
        if self._job is not None:
            everyone = self._job.all_gather_object("components of a distributed value", own)
        if len(set(map(len, everyone))) > 1:
            raise DisagreementError(
                f"{who}Expected as many arrays from "
                f"all workers. Received: numbers of arrays={list(map(len, everyone))}, by worker. "
                "Make the same structure on every worker."
            )
        kinds = iter(zip(*everyone, strict=True))
        values: list[Any] = []
        for column, known in zip(columns, shaped, strict=True):
            if not known:
                values.append(_of_objects(column))
                continue
            parts = [part for theirs in next(kinds) for part in theirs]
            is_one_array = len({(len(shape), dtype) for shape, dtype in parts}) == 1
            shapes = [tuple(shape) for shape, _ in parts]
            own = self._source(column, shapes) if is_one_array else tuple(column)
            values.append(PerReplica(own))
        return values

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
