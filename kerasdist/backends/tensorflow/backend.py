"""What TensorFlow is: its devices, and how to make more of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import tensorflow as tf

from kerasdist.backends.base import Backend, ReplicaOptions, ReplicaSet
from kerasdist.backends.tensorflow import datasets, engine_seam, functions, values
from kerasdist.backends.tensorflow.replicas import MirroredReplicas, SoleDevice
from kerasdist.devices import Device
from kerasdist.errors import DeviceError, KerasdistError, UnsupportedError


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
        if options.parameter_device not in (None, *devices[:1]) or (
            options.parameter_device is not None and len(devices) > 1
        ):
            # tf.distribute's own gives Keras's metrics one state for all replicas, which counts
            # what it was before once a replica, and refuses what replicas assign to seeds.
            raise UnsupportedError(
                "Expected variables on every device that computes: on TensorFlow kerasdist does "
                "not keep them on one. Received: "
                f"parameter_device={options.parameter_device}, "
                f"compute_devices={[str(device) for device in devices]}. Use "
                "kerasdist.MirroredStrategy, or another backend."
            )
        if len(devices) == 1:
            return SoleDevice(devices, options)
        return MirroredReplicas(devices, options)

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

BACKEND = TensorFlowBackend()
