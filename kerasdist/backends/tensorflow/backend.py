"""What TensorFlow is: its devices, and how to make more of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, final

import tensorflow as tf

from kerasdist.backends.base import Backend, ReplicaOptions, ReplicaSet
from kerasdist.backends.tensorflow import (
    datasets,
    engine_seam,
    functions,
    sums_seam,
    values,
    workers_seam,
)
from kerasdist.backends.tensorflow.replicas import (
    SoleDevice,
    mirrored_replicas,
    worker_replicas,
)
from kerasdist.collectives import CommunicationOptions
from kerasdist.devices import Device
from kerasdist.errors import DeviceError, JobError, KerasdistError, UnsupportedError

if TYPE_CHECKING:
    from kerasdist.job.job import Job


@final
class TensorFlowBackend(Backend):
    """TensorFlow, with ``tf.distribute`` underneath."""

    name = "tensorflow"

    def devices(self, kind: str) -> tuple[Device, ...]:
        """Returns the logical devices of one kind, which starts TensorFlow's runtime."""
        logical = tf.config.list_logical_devices(kind.upper())
        return tuple(Device(kind, index) for index in range(len(logical)))

    def prepare_cpu_devices(self, count: int) -> None:
        """Divides the machine's CPU into logical devices."""
        [cpu] = tf.config.list_physical_devices("CPU")
        configured = tf.config.get_logical_device_configuration(cpu)
        if configured is not None and len(configured) >= count:
            return
        try:
            tf.config.set_logical_device_configuration(
                cpu, [tf.config.LogicalDeviceConfiguration()] * count
            )
        except RuntimeError as error:
            there_are = len(tf.config.list_logical_devices("CPU"))
            if there_are >= count:
                return
            raise DeviceError(
                f"Expected {count} CPU devices, or a TensorFlow that has not started yet, so that "
                f"they can be made. Received: devices={there_are}. Call "
                f"kerasdist.config.set_logical_cpu_devices({count}) at the top of the script, "
                "before the first model, tensor or random seed."
            ) from error

    def tpu_replica_set(self, resolver: Any, assignment: Any, spmd: bool) -> ReplicaSet:
        """Raises: replicas on TPUs are traced once for all, which nothing here does yet.

        Args:
            resolver: Where the TPUs are.
            assignment: How many replicas there are.
            spmd: Whether XLA is to divide the program.
        """
        del resolver, assignment, spmd
        raise UnsupportedError(
            "Expected JAX, on which kerasdist drives TPUs. Received: the backend tensorflow. Set "
            "KERAS_BACKEND=jax, or use tf.distribute.TPUStrategy itself, without kerasdist."
        )

    def replica_set(self, devices: Sequence[Device], options: ReplicaOptions) -> ReplicaSet:
        """Returns plain Keras on a device, or ``tf.distribute.MirroredStrategy`` over several."""
        kinds = sorted({device.kind for device in devices})
        if "tpu" in kinds and len(devices) > 1:
            raise UnsupportedError(
                "Expected CPUs or GPUs: on TensorFlow several TPU cores need "
                "tf.distribute.TPUStrategy, which kerasdist does not drive yet. Received: "
                f"devices={[str(device) for device in devices]}. Use KERAS_BACKEND=jax, or "
                "kerasdist.OneDeviceStrategy on one core."
            )
        if len(devices) == 1 and options.parameter_device in (None, devices[0]):
            return SoleDevice(devices, options)
        return mirrored_replicas(devices, options)

    def connect(self, job: Job) -> None:
        """Starts TensorFlow's runtime as one of the job's."""
        if workers_seam.has_started():
            raise JobError(
                "Expected TensorFlow not to have started, so that it can join the other workers. "
                f"Received: a started one, on worker {job.rank} of {job.num_workers}. Make the "
                "strategy at the top of the script, before the first model, tensor or random seed."
            )
        job.own_port()
        try:
            workers_seam.start_server(job.addresses, job.rank)
        except tf.errors.OpError as error:
            raise JobError(
                "Expected the workers' TensorFlow runtimes to find each other. Received: "
                f"addresses={job.addresses}, of which TensorFlow says: {error.message!r:.300}. See "
                "to it that each worker can reach all of them."
            ) from error

    def worker_replica_set(
        self,
        devices: Sequence[Device],
        options: ReplicaOptions,
        job: Job,
        communication: CommunicationOptions,
    ) -> ReplicaSet:
        """Returns ``tf.distribute.MultiWorkerMirroredStrategy`` over the workers' devices."""
        return worker_replicas(devices, options, job, communication)

    def function(self, function: Callable[..., Any], jit_compile: bool) -> Callable[..., Any]:
        """Returns a ``tf.function``."""
        return functions.function(function, jit_compile)

    def value_and_grad(
        self, function: Callable[[], Any], variables: Sequence[Any], has_aux: bool
    ) -> tuple[Any, list[Any]]:
        """Calls the function under a gradient tape."""
        return functions.value_and_grad(function, variables, has_aux)


values.register()
datasets.register()
engine_seam.let_autograph_pass_over("kerasdist")
engine_seam.let_errors_pass(KerasdistError)
engine_seam.let_variables_be_read()
sums_seam.keep_sums_of_integers()
engine_seam.advise_against_eager_replicas_once()

BACKEND = TensorFlowBackend()
