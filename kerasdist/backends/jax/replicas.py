"""Devices as replicas of one global program."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, final

import jax

from kerasdist import keras_seam
from kerasdist.agreement import programs
from kerasdist.backends.base import LogicalDevices, ReplicaOptions, ReplicaSet
from kerasdist.backends.jax import scopes
from kerasdist.backends.jax.batches import OwnRowsAdapter, PlacedAdapter
from kerasdist.backends.jax.equality import checksums_of, equalize
from kerasdist.backends.jax.intake import OfWorkers
from kerasdist.backends.jax.layout import Layout
from kerasdist.backends.jax.own_batches import OwnBatchesAdapter
from kerasdist.backends.jax.placement import MeshPlacement, OneDevicePlacement, Placement
from kerasdist.backends.jax.trainer import JaxTrainer
from kerasdist.backends.runner import Runner
from kerasdist.backends.sole import SoleRunner
from kerasdist.devices import Device
from kerasdist.input.sharded import ShardedAdapter
from kerasdist.keras_seam import has_sparse, is_array_adapter

if TYPE_CHECKING:
    from kerasdist.backends.trial import Trial
    from kerasdist.job.job import Job


@final
class JaxReplicaSet(ReplicaSet):
    """Devices that divide each batch of a global program among them.

    Attributes:
        arrays: Where the arrays of a step live.
    """

    def __init__(
        self,
        jax_devices: Sequence[Any],
        devices: Sequence[Device],
        options: ReplicaOptions,
        job: Job | None = None,
    ) -> None:
        """Makes the set.

        Args:
            jax_devices: The devices of all workers, by rank, as JAX knows them.
            devices: Those of this process, by name.
            options: How to compute.
            job: The job of this process, if other workers hold replicas too.
        """
        super().__init__(devices, options, job)
        self.arrays = _placement(jax_devices, options)
        self.arrays.begin_step = self.begin_step
        self.arrays.note_batch = self._note_batch
        if job is not None:
            self.arrays.compare_program = partial(programs.require_equal, job)

    def _note_batch(self, form: Hashable) -> None:
        self.course.note(form)
        self.first_batches.compare()

    @cached_property
    def runner(self) -> Runner:
        """How user functions run on the mesh."""
        if self.num_replicas == 1:
            return SoleRunner(self.placement)
        from kerasdist.backends.jax.runner import JaxRunner

        return JaxRunner(self)

    @property
    def logical_devices(self) -> LogicalDevices:
        """The devices of one replica."""
        assert isinstance(self.arrays, MeshPlacement)
        return self.arrays.layout

    @property
    def trainer_class(self) -> type[JaxTrainer]:
        """The trainer that compiles a model's steps for the mesh."""
        return JaxTrainer

    def trial(self, model: Any) -> Trial:
        """Returns what a training step is tried with."""
        if self.num_replicas == 1:
            return super().trial(model)
        from kerasdist.backends.jax.trial import JaxTrial  # few programs need it

        return JaxTrial(model)

    def data_adapter(self, adapter: Any) -> Any:
        """Returns an adapter that places batches ahead of their step where that pays."""
        if not self.arrays.places_ahead:
            return adapter
        place = self.arrays
        if isinstance(place, MeshPlacement) and isinstance(place.intake, OfWorkers):
            if isinstance(adapter, ShardedAdapter):
                return OwnBatchesAdapter(adapter, place.layout, place.intake)
            if is_array_adapter(adapter) and not has_sparse(adapter):
                return OwnRowsAdapter(adapter, place.intake)
        return PlacedAdapter(adapter, self.arrays, self.first_batches)

    def equalize(self, variables: Sequence[Any]) -> None:
        """Gives variables the chief's values, bit by bit, in a collective or a few."""
        assert isinstance(self.arrays, MeshPlacement)
        equalize(variables, self.arrays)

    def checksums(self, variables: Sequence[Any]) -> list[int]:
        """Returns a checksum of each variable's value on this worker; computed where it lies."""
        return checksums_of([keras_seam.stored_value(variable) for variable in variables])

    def placement(self) -> AbstractContextManager[Any]:
        """Returns a context in which variables are made on the first device.

        The first step copies them to the others, in one transfer; there they stay.
        """
        scopes.note(self.arrays)
        return self.arrays.variables()


def _placement(devices: Sequence[Any], options: ReplicaOptions) -> Placement:
    if len(devices) == 1:
        return OneDevicePlacement(devices)
    home = options.parameter_device
    return MeshPlacement(
        Layout(devices, options.devices_per_replica),
        None if home is None else jax.local_devices(backend=home.kind)[home.index],
    )
