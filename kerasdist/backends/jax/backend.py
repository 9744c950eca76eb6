"""What JAX is: its devices, and the replica sets made of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, final

import jax
import keras

from kerasdist.backends.base import Backend, ReplicaOptions
from kerasdist.backends.checks import check_no_compression
from kerasdist.backends.jax import connection, creation, functions
from kerasdist.backends.jax.replicas import JaxReplicaSet
from kerasdist.collectives import CommunicationOptions
from kerasdist.devices import Device
from kerasdist.errors import DeviceError, UnsupportedError
from kerasdist.partitions import DeviceAssignment

if TYPE_CHECKING:
    from kerasdist.job.job import Job


@final
class JaxBackend(Backend):
    """JAX on this machine."""

    name = "jax"

    def devices(self, kind: str) -> tuple[Device, ...]:
        """Returns this process's devices of one kind; this starts JAX."""
        return tuple(Device(kind, index) for index in range(len(_local_devices(kind))))

    def prepare_cpu_devices(self, count: int) -> None:
        """Asks JAX for `count` CPU devices; once it has started, checks that they are there."""
        if jax.config.values["jax_num_cpu_devices"] >= count:
            return  # a strategy on some of the devices must not take the others away
        try:
            jax.config.update("jax_num_cpu_devices", count)
        except RuntimeError as error:  # JAX has started, and its devices are what they are
            available = len(_local_devices("cpu"))
            if available < count:
                raise DeviceError(
                    f"Expected JAX to have {count} CPU devices, or not to have started yet. "
                    f"Received: cpu_devices={available}, and JAX has started. Call "
                    "kerasdist.config.set_logical_cpu_devices(n), or make the strategy, before the "
                    "first array, model or random seed is made, or set KERASDIST_CPU_DEVICES=n."
                ) from error

    @property
    def reads_ahead(self) -> bool:
        """On accelerators, to move a batch there while the step before it runs."""
        return jax.default_backend() != "cpu"

    def tpu_replica_set(
        self, resolver: Any, assignment: DeviceAssignment | None, spmd: bool
    ) -> JaxReplicaSet:
        """Returns a mesh of replicas and their logical devices.

        Args:
            resolver: Not needed: JAX finds its devices.
            assignment: How many replicas there are, and how many devices each has.
            spmd: Not needed: XLA always divides the program.
        """
        del resolver, spmd
        devices = self.accelerators() or self.devices("cpu")
        assignment = assignment or DeviceAssignment.build(len(devices))
        per_replica = assignment.num_cores_per_replica
        needed = assignment.num_replicas * per_replica
        if needed > len(devices):
            raise DeviceError(
                f"Expected {needed} devices for {assignment.num_replicas} replicas of "
                f"{per_replica} each. Received: devices={[str(device) for device in devices]}. To "
                "try it without accelerators, call kerasdist.config.set_logical_cpu_devices"
                f"({needed}) before JAX starts."
            )
        return self.replica_set(devices[:needed], ReplicaOptions(devices_per_replica=per_replica))

    def replica_set(self, devices: Sequence[Device], options: ReplicaOptions) -> JaxReplicaSet:
        """Returns a mesh over the devices."""
        _prepare(options, several=len(devices) > 1)
        return JaxReplicaSet(_named(devices), devices, options)

    def connect(self, job: Job) -> None:
        """Starts `jax.distributed`."""
        connection.connect(job)

    def worker_replica_set(
        self,
        devices: Sequence[Device],
        options: ReplicaOptions,
        job: Job,
        communication: CommunicationOptions,
    ) -> JaxReplicaSet:
        """Returns a mesh over the devices of all workers; XLA knows best how they communicate."""
        check_no_compression(communication.compression, "JAX")
        _prepare(options, several=True)
        here = _named(devices)
        if here[0].platform == "cpu":
            connection.check_way_back(job)
        job.agree("kind of devices", {"platform": here[0].platform})
        numbers = job.exchange("devices", [device.id for device in here])
        known = {device.id: device for device in jax.devices(here[0].platform)}
        everywhere = [known[number] for theirs in numbers for number in theirs]
        return JaxReplicaSet(everywhere, devices, options, job)

    def function(self, function: Callable[..., Any], jit_compile: bool) -> Callable[..., Any]:
        """Compiles a function together with the variables it uses; JAX always compiles with XLA."""
        del jit_compile
        creation.install()
        return functions.function(function)

    def value_and_grad(
        self, function: Callable[[], Any], variables: Sequence[Any], has_aux: bool
    ) -> tuple[Any, list[Any]]:
        """Differentiates as JAX does."""
        creation.install()
        return functions.value_and_grad(function, variables, has_aux)


def _prepare(options: ReplicaOptions, several: bool) -> None:
    creation.install()
    if keras.config.is_nnx_enabled():
        raise UnsupportedError(
            "Expected Keras's variables to be its own on JAX. Received: nnx_enabled=True. "
            "Unset KERAS_NNX_ENABLED, or train without a kerasdist strategy."
        )
    if options.batch_norm == "per_replica" and several:
        raise UnsupportedError(
            "Expected batch_norm='synchronized' on JAX. Received: batch_norm='per_replica'. "
            "There fit is one program over the global batch, in which statistics of a part of "
            "the batch cost more, not less. Leave out batch_norm."
        )


def _named(devices: Sequence[Device]) -> list[Any]:
    return [_local_devices(device.kind)[device.index] for device in devices]


def _local_devices(kind: str) -> list[Any]:
    try:
        return jax.local_devices(backend=kind)
    except RuntimeError:  # JAX has no platform of this name
        return []


BACKEND = JaxBackend()
