"""The replica set of JAX: devices that run one global program."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, final

import jax

from kerasdist import keras_compat
from kerasdist.backends.base.checks import count_hosts
from kerasdist.backends.base.interface import ReplicaOptions, ReplicaSet
from kerasdist.backends.base.runner import Runner, SoleRunner
from kerasdist.backends.jax.fit.batches import PlacedAdapter
from kerasdist.backends.jax.fit.trainer import JaxTrainer
from kerasdist.backends.jax.loops import scopes
from kerasdist.backends.jax.mesh import sharded_state, worker_placement
from kerasdist.backends.jax.mesh.arrays import is_sharded
from kerasdist.backends.jax.mesh.layout import ByLayoutMap, Layout
from kerasdist.backends.jax.mesh.placement import STEPS_AHEAD, CentralPlacement, Placement
from kerasdist.backends.jax.mesh.worker_placement import WorkerPlacement, checksums_of
from kerasdist.core.devices import Device
from kerasdist.core.sharding import HeldShard

if TYPE_CHECKING:
    import keras

    from kerasdist.job.job import Job


@final
class JaxReplicaSet(ReplicaSet):
    """The devices of a strategy, which run one program on each global batch.

    Attributes:
        arrays: The placement, which puts the arrays of steps on the devices.
    """

    trainer_class = JaxTrainer

    def __init__(
        self,
        jax_devices: Sequence[Any],
        devices: Sequence[Device],
        options: ReplicaOptions,
        job: Job | None = None,
    ) -> None:
        self.arrays = self._place(jax_devices, options, job)
        super().__init__(_in_order_of(self.arrays, jax_devices, devices), options, job)
        self.steps_ahead = STEPS_AHEAD  # also on CPUs, because JAX is asynchronous there, too
        self.logical_devices = self.arrays.layout
        if self.arrays.layout.shards_between_steps:
            sharded_state.add(self.arrays)
        self._kind = jax_devices[0].device_kind

    def _place(self, devices: Sequence[Any], options: ReplicaOptions, job: Job | None) -> Placement:
        hosts = count_hosts(options.sharding, job, len(devices))
        if len(devices) == 1:  # in `kerasdist plan`, one CPU device stands for all devices
            options = replace(options, devices_per_replica=1, sharding=None)
        offload = options.offload is not None
        layout = Layout(
            devices, options.devices_per_replica, options.sharding, hosts, offload=offload
        )
        if layout.spans_workers:
            assert job is not None
            return WorkerPlacement(layout, job, self.begin_step, self._note_batch)
        home = options.parameter_device
        if home is None or len(devices) == 1:
            return Placement(layout, self.begin_step)
        return CentralPlacement(layout, jax.local_devices(backend=home.kind)[home.index])

    def _note_batch(self, form: Hashable) -> None:
        self.first_batches.history.add(form)
        self.first_batches.compare()

    @cached_property
    def runner(self) -> Runner:
        """The object that runs user functions on the mesh."""
        if self.num_replicas == 1:
            return SoleRunner(self.placement)
        from kerasdist.backends.jax.loops.runner import JaxRunner

        return JaxRunner(self, self.arrays)

    def free_bytes(self) -> int | None:
        """Returns how much memory is free on the fullest local device; None for CPUs."""
        known = [one for device in self.arrays.layout.local if (one := device.memory_stats())]
        return min((one["bytes_limit"] - one["bytes_in_use"] for one in known), default=None)

    def device_kind(self) -> str | None:
        """Returns the product name of these devices, such as that of a GPU or TPU."""
        return self._kind

    def data_adapter(self, adapter: Any) -> Any:
        """Returns an adapter that yields single batches, and places them early on accelerators.

        Before Keras 3.16, CPU devices of one process need no such adapter.
        """
        if not self.arrays.places_ahead and not keras_compat.STACKS_BATCHES:
            return adapter
        return PlacedAdapter(adapter, self.arrays, self.first_batches)

    def equalize(self, variables: Sequence[keras.Variable]) -> None:
        """Gives variables exactly the chief's values, in one or a few collectives.

        Sharded variables are left out. Workers already agree on the value of a sharded variable
        whenever it is initialized or assigned.
        """
        held = [one for one in variables if not is_sharded(keras_compat.stored_value(one))]
        if held:
            self.arrays.equalize(held)

    def shards(self, variable: keras.Variable) -> list[HeldShard]:
        """Returns this process's shards of a variable; an empty list if it is not sharded."""
        return worker_placement.shards_of(variable)

    def held(self, variable: keras.Variable) -> tuple[str, str, tuple[int, ...]]:
        """Returns which axes of the mesh shard a variable, the reason, and the shape of a shard."""
        # `kerasdist plan` replaces `logical_devices` by a layout of the devices that it plans for.
        layout: Layout = self.logical_devices
        [sharding], (how, why, shape) = layout.of_variables([variable]), super().held(variable)
        if layout.rule is not None:
            why = layout.rule.why(variable)
        elif not sharding.is_fully_replicated:
            why = "the script divides it"
        if not sharding.is_fully_replicated:
            axes = [*sharding.spec, *[None] * (len(shape) - len(sharding.spec))]
            names = [" and ".join(one) if isinstance(one, tuple) else str(one) for one in axes]
            if isinstance(layout.rule, ByLayoutMap):
                names = [one.removeprefix("logical_") for one in names]
            how, shape = f"({', '.join(names)})", tuple(sharding.shard_shape(shape))
        return (
            (f"{how}, on the host", why, (0,)) if layout.offloads(variable) else (how, why, shape)
        )

    def checksums(self, variables: Sequence[keras.Variable]) -> list[int]:
        """Returns a checksum of each variable's value on this worker; 0 for a sharded variable."""
        return checksums_of(keras_compat.stored_values(variables))

    def is_tracing(self) -> bool:
        """Returns whether this thread is tracing a program."""
        return scopes.program() is not None

    def placement(self) -> AbstractContextManager[Any]:
        """Returns a context in which new variables are made on one device, usually the first.

        The first step copies the variables to the other devices, and the copies stay there, unless
        the strategy keeps its variables on one device.
        """
        program = scopes.program()
        if program is not None:
            program.compute_on(self.arrays)
        return self.arrays.variables()


def _in_order_of(
    place: Placement, jax_devices: Sequence[Any], devices: Sequence[Device]
) -> list[Device]:
    """Returns this process's devices in the order of its replicas, which the mesh determines."""
    if len(jax_devices) == 1:  # in `kerasdist plan`, one CPU device stands for all devices
        return list(devices)
    here = [one for one in jax_devices if one.process_index == jax.process_index()]
    names = dict(zip(here, devices, strict=True))
    return [names[one] for one in place.layout.local]
