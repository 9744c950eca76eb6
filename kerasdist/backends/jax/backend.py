"""JAX's `Backend`: its devices, replica sets, compiled functions and gradients."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from importlib import metadata
from pathlib import Path
from typing import Any, final

import jax
import keras

from kerasdist import keras_compat
from kerasdist.backends.base.checks import check_communication
from kerasdist.backends.base.interface import (
    Backend,
    CheckpointFormat,
    Event,
    Profiler,
    ReplicaOptions,
    read_chrome_trace,
)
from kerasdist.backends.jax import connection
from kerasdist.backends.jax.loops import functions
from kerasdist.backends.jax.loops.replicas import JaxReplicaSet
from kerasdist.backends.jax.mesh import creation
from kerasdist.backends.jax.mesh.gathers import inner_programs
from kerasdist.backends.jax.mesh.layout import Layout
from kerasdist.cluster import kerasdist_variables
from kerasdist.core.devices import Device
from kerasdist.errors import JobError, UnsupportedError
from kerasdist.job.job import Job, current_job

# `_config` has the type Any, because JAX adds the settings to `jax.config`'s class at run time.
_config: Any = jax.config

_SETTINGS = (
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_disable_jit",
    "jax_enable_x64",
    "jax_numpy_dtype_promotion",
    "jax_threefry_partitionable",
)


@final
class JaxProfiler(Profiler):
    """Records with JAX's profiler, and reads the events from its trace file in Chrome's format."""

    def start(self, folder: Path) -> None:
        """Starts recording."""
        jax.profiler.start_trace(folder)

    def marked(self, name: str) -> AbstractContextManager[Any]:
        """Returns a context that is recorded as an event of this name."""
        return jax.profiler.TraceAnnotation(name)

    def stop(self, folder: Path) -> Iterable[Event]:
        """Stops recording; returns the events."""
        jax.profiler.stop_trace()
        for path in folder.rglob("*.trace.json.gz"):
            yield from read_chrome_trace(path)


class JaxBackend(Backend):
    """The backend of JAX on this machine."""

    name = "jax"
    profiler = JaxProfiler
    function = staticmethod(functions.function)
    value_and_grad = staticmethod(functions.value_and_grad)

    def devices(self, kind: str) -> tuple[Device, ...]:
        """Returns this process's devices of one kind. The call starts JAX."""
        return tuple(Device(kind, index) for index in range(len(_local_devices(kind))))

    def coordinates(self, kind: str) -> Sequence[Sequence[tuple[int, ...]]] | None:
        """Returns the coordinates of each process's TPU cores; None for other devices.

        Also returns None if the cores are in several slices, because the coordinates of each slice
        begin at 0.
        """
        return coordinates_of(jax.devices(kind)) if kind == "tpu" else None

    def make_cpu_devices(self, count: int) -> None:
        """Makes JAX have at least `count` CPU devices."""
        # NPROC is the number of XLA's threads. With too few threads JAX can deadlock; the docstring
        # of `_wait_sometimes` in mesh/placement.py explains why. In an eager step the host starts
        # hundreds of programs without waiting, so a machine with few cores needs more threads than
        # cores.
        os.environ.setdefault("NPROC", str(max(os.cpu_count() or 1, 4 * count)))
        # A later strategy on fewer devices must not reduce the number.
        if _config.jax_num_cpu_devices < count:
            jax.config.update("jax_num_cpu_devices", count)

    def uses_gpus(self) -> bool | None:
        """Returns whether JAX has a GPU plug-in.

        Returns None if the user's settings exclude all GPUs, or choose which GPUs JAX uses.
        """
        platforms = _config.jax_platforms
        without = platforms and not {"cuda", "gpu", "rocm"} & set(platforms.split(","))
        chosen = {_config.read(f"jax_{kind}_visible_devices") for kind in ("cuda", "rocm")}
        if without or chosen != {"all"} or os.environ.get("JAX_LOCAL_DEVICE_IDS"):
            return None
        plugins = metadata.entry_points(group="jax_plugins")
        return any("cuda" in plugin.name or "rocm" in plugin.name for plugin in plugins)

    def settings(self) -> dict[str, Any]:
        """Returns the settings of JAX on which a compiled program depends."""
        return {name: str(getattr(_config, name)) for name in _SETTINGS}

    def connect(self, job: Job, gpus: Sequence[int] | None = None) -> tuple[Device, ...]:
        """Starts `jax.distributed` and JAX. Returns the GPUs of `gpus`, with numbers from 0."""
        connection.connect(job, gpus)
        return self.devices("gpu") if gpus else ()

    def replica_set(
        self, devices: Sequence[Device], options: ReplicaOptions, job: Job | None = None
    ) -> JaxReplicaSet:
        """Returns the replicas on all workers' devices. XLA chooses how replicas communicate."""
        _prepare(options, several=job is not None or len(devices) > 1)
        here = [_local_devices(device.kind)[device.index] for device in devices]
        if job is None:
            _require_no_other_processes(devices[0].kind)
            if len(here) == 1 and isinstance(options.sharding, keras_compat.LayoutMap):
                Layout(here, 1, options.sharding)  # raises if the map's mesh has other devices
            return JaxReplicaSet(here, devices, options)
        check_communication(options.communication, "JAX", ())
        if len(devices) % options.devices_per_replica:
            raise UnsupportedError(
                f"{job.who} Expected each worker to have all devices of its replicas. Received: "
                f"devices={len(devices)}, and a LayoutMap by which a replica has "
                f"{options.devices_per_replica} devices. Divide the batch over more devices, and "
                "the variables over fewer."
            )
        if here[0].platform == "cpu":
            connection.check_way_back(job)
        job.assert_equal("kind of devices", {"platform": here[0].platform})
        numbers = job.all_gather_object("devices", [device.id for device in here])
        known = {device.id: device for device in jax.devices(here[0].platform)}
        everywhere = [known[number] for theirs in numbers for number in theirs]
        return JaxReplicaSet(everywhere, devices, options, job)

    def count_flops(self, function: Callable[..., object], *arguments: object) -> float:
        """Returns how many floating-point operations the matrix products of a call need.

        The number is computed by `matmul_flops`, as in ``kerasdist plan``.
        """
        shapes = [
            keras.tree.map_structure(lambda one: jax.ShapeDtypeStruct(one.shape, one.dtype), each)
            for each in arguments
        ]
        return sum(matmul_flops(jax.make_jaxpr(function)(*shapes)).values())

    def checkpoint_format(self) -> CheckpointFormat:
        """Returns Orbax's format."""
        # imported here, because few programs need this module
        from kerasdist.backends.jax.checkpoints import OrbaxFormat

        return OrbaxFormat()


def coordinates_of(devices: Sequence[Any]) -> list[list[tuple[int, ...]]] | None:
    """Returns the coordinates of TPU cores, by process.

    Returns None if two cores have the same coordinates, which happens with several TPU slices.
    """
    by_process: dict[int, list[tuple[int, ...]]] = {}
    for one in devices:
        by_process.setdefault(one.process_index, []).append((*one.coords, one.core_on_chip))
    found = [by_process[process] for process in sorted(by_process)]
    return found if len({place for own in found for place in own}) == len(devices) else None


def matmul_flops(jaxpr: Any) -> Counter[str]:
    """Returns how many floating-point operations a traced function's matrix products need, by type.

    Convolutions count as matrix products. The type of a product is the type of its left operand.
    """
    found: Counter[str] = Counter()
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        name, parameters = equation.primitive.name, equation.params
        if name == "dot_general":
            (contracted, _), _ = parameters["dimension_numbers"]
            left = equation.invars[0].aval
            inner = math.prod(left.shape[axis] for axis in contracted)
            found[str(left.dtype)] += 2 * inner * math.prod(equation.outvars[0].aval.shape)
        elif name == "conv_general_dilated":
            left, kernel = (one.aval for one in equation.invars)
            outputs = kernel.shape[parameters["dimension_numbers"].rhs_spec[0]]
            # A dilated input has zeros between its elements. Products with the zeros do not count.
            inner = math.prod(kernel.shape) / outputs / math.prod(parameters["lhs_dilation"])
            found[str(left.dtype)] += 2 * inner * math.prod(equation.outvars[0].aval.shape)
        # cuDNN's attention, whose query and key have the axes (batch, length, head, size)
        elif name == "dot_product_attention_fwd_wrapper":
            query, key = (one.aval for one in equation.invars[:2])
            found[str(query.dtype)] += 4 * math.prod(query.shape) * key.shape[1]
        elif name == "rnn_fwd":  # cuDNN's LSTM has four gates; its shapes are (batch, length, size)
            inputs, width = equation.invars[0].aval, parameters["hidden_size"]
            products = 4 * width * (inputs.shape[2] + width)
            found[str(inputs.dtype)] += 2 * math.prod(inputs.shape[:2]) * products
        else:
            times = parameters.get("length", 1) if name == "scan" else 1
            counts = [matmul_flops(inner) for inner in inner_programs(parameters)]
            if name == "cond" and counts:
                counts = [max(counts, key=lambda one: sum(one.values()))]
            for count in counts:
                found.update({kind: flops * times for kind, flops in count.items()})
    return found


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
            "On JAX fit is one program over the global batch, in which each replica's own "
            "statistics would cost more, not less. Leave out batch_norm."
        )


def _require_no_other_processes(kind: str) -> None:
    """Refuses a strategy of one process if JAX has other processes, as in a TPU slice.

    Otherwise each process would train by itself on all data, and nobody would notice. A worker that
    has joined its job may also use a strategy of one process, besides the strategy of the job.
    """
    count = jax.process_count(kind)
    if count > 1 and current_job() is None and not kerasdist_variables.is_independent(None):
        raise JobError(
            f"Expected a strategy over all {count} processes that JAX knows, of which this is "
            f"number {jax.process_index(kind)}. Received: a strategy of one process, since no "
            "environment describes the job (`kerasdist info` says what is missing): each process "
            "would train a model by itself, on all data. Set KERASDIST_WORKERS, KERASDIST_RANK and "
            "KERASDIST_COORDINATOR in each process, or start the processes with `kerasdist run`, "
            "and use kerasdist.TPUStrategy() or kerasdist.MultiWorkerMirroredStrategy(). If they "
            f"are to be independent, set the variable {kerasdist_variables.CLUSTER}=none."
        )


def _local_devices(kind: str) -> list[Any]:
    try:
        return jax.local_devices(backend=kind)
    except RuntimeError:  # JAX has no platform of this name
        return []


BACKEND = JaxBackend()
