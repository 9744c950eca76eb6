"""TensorFlow's `Backend`: its devices, replica sets, compiled functions and gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import keras
import tensorflow as tf

from kerasdist.backends.base.checks import started_too_early
from kerasdist.backends.base.interface import Backend, Event, Profiler, ReplicaOptions, ReplicaSet
from kerasdist.backends.tensorflow.internals import XPLANE
from kerasdist.backends.tensorflow.private import patches, strategies
from kerasdist.backends.tensorflow.private.compiled import explained
from kerasdist.backends.tensorflow.replica import values, variables
from kerasdist.backends.tensorflow.replica.replicas import (
    SoleDevice,
    mirrored_replicas,
    worker_replicas,
)
from kerasdist.backends.tensorflow.replica.variables import copies, reads_preceded
from kerasdist.core.devices import Device
from kerasdist.errors import JobError, UnsupportedError

if TYPE_CHECKING:
    from kerasdist.job.job import Job


@final
class TensorFlowProfiler(Profiler):
    """Records with TensorFlow's profiler, and reads its XPlane files with TensorFlow's own class.

    TensorBoard's profile plug-in can read these files too, but it is a separate package.
    """

    def start(self, folder: Path) -> None:
        """Starts recording."""
        tf.profiler.experimental.start(str(folder))

    def marked(self, name: str) -> AbstractContextManager[Any]:
        """Returns a context that is recorded as an event of this name."""
        return tf.profiler.experimental.Trace(name)

    def stop(self, folder: Path) -> Iterable[Event]:
        """Stops recording; returns the events."""
        tf.profiler.experimental.stop()
        for path in folder.rglob("*.xplane.pb"):
            yield from _events_of(path)


@final
class TensorFlowBackend(Backend):
    """The backend of TensorFlow, which uses ``tf.distribute``."""

    name = "tensorflow"
    profiler = TensorFlowProfiler
    # On TPUs, all replicas must share one trace, which this backend does not support yet.
    tpu_refusal = (
        "Expected JAX, on which kerasdist drives TPUs. Received: the backend tensorflow. Set "
        "KERAS_BACKEND=jax, or use tf.distribute.TPUStrategy itself, without kerasdist."
    )

    def devices(self, kind: str) -> tuple[Device, ...]:
        """Returns the logical devices of one kind; this starts TensorFlow's runtime."""
        logical = tf.config.list_logical_devices(kind.upper())
        return tuple(Device(kind, index) for index in range(len(logical)))

    def make_cpu_devices(self, count: int) -> None:
        """Divides the machine's CPU into logical devices."""
        [cpu] = tf.config.list_physical_devices("CPU")
        if len(tf.config.get_logical_device_configuration(cpu) or ()) < count:
            own = [tf.config.LogicalDeviceConfiguration()] * count
            tf.config.set_logical_device_configuration(cpu, own)

    def settings(self) -> dict[str, Any]:
        """Returns whether functions run eagerly.

        The setting must be equal on all workers, because in an eager function each collective runs
        at once, when the code calls it.
        """
        return {"run_functions_eagerly": tf.config.functions_run_eagerly()}

    def replica_set(
        self, devices: Sequence[Device], options: ReplicaOptions, job: Job | None = None
    ) -> ReplicaSet:
        """Returns replicas under a ``tf.distribute`` strategy; for one device, a `SoleDevice`."""
        patches.install()
        if options.sharding is not None:
            raise UnsupportedError(
                "Expected sharding=None on TensorFlow, where each replica holds all weights and "
                f"all of the optimizer's state. Received: sharding={options.sharding!r:.200}. Set "
                "KERAS_BACKEND=jax or torch, on which kerasdist shards both."
            )
        if options.offload is not None:
            raise UnsupportedError(
                "Expected offload=None on TensorFlow, where the devices hold the optimizer's "
                f"state. Received: offload={options.offload!r}. Set KERAS_BACKEND=jax or torch, "
                "on which the host can hold it."
            )
        if job is not None:
            return worker_replicas(devices, options, job)
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

    def uses_gpus(self) -> bool | None:
        """Returns whether TensorFlow is built for GPUs; None if some GPUs are hidden from it."""
        if tf.config.list_physical_devices("GPU") != tf.config.get_visible_devices("GPU"):
            return None
        return tf.test.is_built_with_gpu_support()

    def connect(self, job: Job, gpus: Sequence[int] | None = None) -> tuple[Device, ...]:
        """Starts TensorFlow's runtime as this worker's server.

        If `gpus` is given, TensorFlow sees only these GPUs, and numbers them from 0.
        """
        if strategies.has_started():
            raise started_too_early(job, "TensorFlow")
        if gpus is not None:
            found = tf.config.list_physical_devices("GPU")
            own = [found[number] for number in gpus if number < len(found)]
            tf.config.set_visible_devices(own, "GPU")
        job.own_port()
        addresses = job.gather_addresses()
        try:
            strategies.start_server(addresses, job.rank)
        except tf.errors.OpError as error:
            raise JobError(
                "Expected the workers' TensorFlow runtimes to find each other. Received: "
                f"{len(addresses)} addresses, the first {addresses[0]}, of which TensorFlow says: "
                f"{error.message!r:.300}. Make sure that each worker can reach all addresses."
            ) from error
        return self.devices("gpu") if gpus else ()

    @staticmethod
    def function(function: Callable[..., Any], jit_compile: bool) -> Callable[..., Any]:
        """Returns a ``tf.function``. If a worker is lost in a call, the error names that worker."""
        patches.install()
        # With `reduce_retracing` the second batch size causes a new trace; further sizes do not.
        return explained(
            tf.function(function, jit_compile=jit_compile or None, reduce_retracing=True)
        )

    def count_flops(self, function: Callable[..., object], *arguments: object) -> float | None:
        """Counts the floating-point operations in the graph of a call.

        Returns None if the graph contains loops or calls of other functions.
        """
        specs = [
            keras.tree.map_structure(lambda one: tf.TensorSpec(one.shape, one.dtype), each)
            for each in arguments
        ]
        graph = tf.function(function, autograph=False).get_concrete_function(*specs).graph
        found = graph.get_operations()
        if any(attr.HasField("func") for one in found for attr in one.node_def.attr.values()):
            return None
        return sum(map(_flops_of, found))

    @staticmethod
    def value_and_grad(
        function: Callable[[], tuple[Any, Any]], variables: Sequence[Any]
    ) -> tuple[tuple[Any, Any], list[Any]]:
        """Calls the function under a gradient tape.

        Returns the function's result, and a gradient for each variable: None for a variable that
        the function did not read.
        """
        sources = [_component(variable) for variable in variables]
        # If the tape returns None for a variable that the function has read, as it does for a read
        # under ``ops.stop_gradient``, the gradient becomes zeros. So the reads are recorded here.
        read: set[int] = set()
        with reads_preceded(lambda variable: read.add(id(variable))), tf.GradientTape() as tape:
            tape.watch([source for source in sources if not source.trainable])
            result = function()
        # Reads in a `tf.function` that is already traced do not call the listener above, but the
        # tape records them.
        seen = {id(one.handle) for one in tape.watched_variables() if one.trainable}
        return result, [
            tf.zeros(source.shape, source.dtype)
            if gradient is None and (id(variable) in read or id(source.handle) in seen)
            else gradient
            for variable, source, gradient in zip(
                variables, sources, tape.gradient(result[0], sources), strict=True
            )
        ]


def _flops_of(operation: tf.Operation) -> float:
    """Returns the floating-point operations of a matrix product or convolution; otherwise 0."""
    if operation.type not in _CONTRACTED:
        return 0.0
    shapes = [_shape(one) for one in operation.inputs]
    result = shapes[2] if "Backprop" in operation.type else _shape(operation.outputs[0])
    return 2.0 * math.prod(result) * math.prod(_CONTRACTED[operation.type](operation, *shapes))


def _shape(array: tf.Tensor) -> list[int]:
    if not array.shape.is_fully_defined():
        raise ValueError(f"Expected a known shape. Received: {array.shape}.")
    return [size or 0 for size in array.shape.as_list()]


def _contracted_by_einsum(operation: tf.Operation, *shapes: list[int]) -> list[int]:
    inputs, _, output = operation.get_attr("equation").decode().partition("->")
    sizes: dict[str, int] = {}
    for labels, shape in zip(inputs.split(","), shapes, strict=True):
        first, _, last = labels.partition("...")
        sizes |= zip(first, shape, strict=False)
        sizes |= zip(reversed(last), reversed(shape), strict=False)
    return [size for label, size in sizes.items() if label not in output]


# For each kind of matrix product and convolution: a function that returns the sizes of the axes
# over which the operation sums.
_CONTRACTED: dict[str, Callable[..., list[int]]] = {
    "MatMul": lambda one, left, _: [left[0 if one.get_attr("transpose_a") else 1]],
    "BatchMatMulV2": lambda one, left, _: [left[-2 if one.get_attr("adj_x") else -1]],
    "Einsum": _contracted_by_einsum,
    **dict.fromkeys(("Conv2D", "Conv3D"), lambda _, image, kernel: kernel[:-1]),
    "DepthwiseConv2dNative": lambda _, image, kernel: kernel[:2],
    "Conv2DBackpropInput": lambda _, size, kernel, image: kernel[:-1],
    "Conv3DBackpropInputV2": lambda _, size, kernel, image: kernel[:-1],
}


def _component(variable: object) -> Any:
    """Returns the copy of a variable that the calling replica reads."""
    held = copies(variable)
    replica = tf.distribute.get_replica_context()
    if replica is None or len(held) == 1:  # cross-replica code reads the first copy
        return held[0]
    # In a graph the replica's number is a constant. All workers have the same number of replicas,
    # so the remainder is the replica's number in its own process.
    return held[tf.get_static_value(replica.replica_id_in_sync_group) % len(held)]


def _events_of(path: Path) -> Iterator[Event]:
    """Yields the events of an XPlane file, converted to Chrome's trace format.

    Each plane of the file becomes a process, and each line of a plane becomes a thread.
    """
    space = XPLANE.value()
    space.ParseFromString(path.read_bytes())
    for process, plane in enumerate(space.planes):
        yield _name("process_name", process, 0, plane.name)
        for thread, line in enumerate(plane.lines):
            yield _name("thread_name", process, thread, line.display_name or line.name)
            for event in line.events:
                known = plane.event_metadata[event.metadata_id]
                yield {
                    "ph": "X",
                    "pid": process,
                    "tid": thread,
                    "name": known.display_name or known.name,
                    "ts": line.timestamp_ns / 1e3 + event.offset_ps / 1e6,
                    "dur": event.duration_ps / 1e6,
                }


def _name(kind: str, process: int, thread: int, name: str) -> Event:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}


values.register()
variables.install()

BACKEND = TensorFlowBackend()
