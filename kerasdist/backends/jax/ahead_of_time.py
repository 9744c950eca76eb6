"""Compiles the program of `fit` by XLA for accelerators that this machine does not have."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

import jax

from kerasdist.backends.jax.backend import JaxBackend, matmul_flops
from kerasdist.backends.jax.fit.steps import StepFunction
from kerasdist.backends.jax.internals import GET_TOPOLOGY
from kerasdist.backends.jax.loops import normalization
from kerasdist.backends.jax.loops.replicas import JaxReplicaSet
from kerasdist.backends.jax.mesh import host_memory, sharded_state
from kerasdist.backends.jax.mesh.arrays import HOST
from kerasdist.backends.jax.mesh.layout import Layout, note_all
from kerasdist.backends.jax.mesh.placement import Placement
from kerasdist.core.devices import Device
from kerasdist.core.hardware import Target, target_config
from kerasdist.core.sharding import Offload, Sharding
from kerasdist.errors import UnsupportedError

if TYPE_CHECKING:
    import keras

    from kerasdist.backends.base.interface import ReplicaOptions
    from kerasdist.job.job import Job

_NAMED_DEVICES = 1024  # A planned script may name devices, such as gpu:3, up to this number.


def described_devices(target: Target) -> list[Any]:
    """Returns descriptions of a target's devices, for which XLA can compile without the devices.

    JAX makes these descriptions only if the package libtpu (for TPUs) or JAX's GPU plug-in (for
    GPUs) is installed.
    """
    topology, config = target.topology, target_config(target.chip)
    options = {"topology": topology, "target_config": config} if config else {}
    return list(GET_TOPOLOGY.value(topology, platform=target.chip.platform, **options).devices)


@final
@dataclasses.dataclass(frozen=True)
class TrainingProgram:
    """A training step in the form in which `fit` gives it to XLA.

    Attributes:
        lowered: The program before its compilation, a `jax.stages.Lowered`.
        state_bytes: The bytes of state that each device holds, by the kind of variables:
            trainable, non_trainable, optimizer, metrics.
        host_bytes: The bytes of state that the host holds for each device. A step copies them to
            the device and back.
        copied_bytes: How many bytes of copies of this state a device holds at a time in a step, at
            most. For TPUs the number is 0, because the memory that XLA reports for the program
            already includes the copies.
        input_bytes: The bytes of a batch that each device gets.
        matmul_flops: Floating-point operations of matrix products and convolutions in one step, for
            all devices together, by the type of the operands.
        logical_devices: How many devices one replica has.
    """

    lowered: Any
    state_bytes: Mapping[str, int]
    host_bytes: int
    copied_bytes: int
    input_bytes: int
    matmul_flops: Mapping[str, float]
    logical_devices: int


def training_program(model: Any, batch: Any, layout: Layout) -> TrainingProgram:
    """Traces a model's training step for the devices of a layout.

    Args:
        model: A compiled and built Keras model.
        batch: The global batch, or its shapes.
        layout: The mesh, and how variables are sharded over it.
    """
    normalization.install()
    if layout.shards_state:
        sharded_state.install()
    state = {name: _specs(each, layout) for name, each in _variables(model).items()}
    held = {
        name: sum(_bytes_of(one, one.sharding) for one in each if one.sharding.memory_kind != HOST)
        for name, each in state.items()
    }
    own = [_bytes_of(one, one.sharding) for one in state["optimizer"]]
    host_bytes = sum(own) - held["optimizer"]
    copied = 0
    if layout.mesh.devices.flat[0].platform != "tpu":
        copied = min(host_bytes, 2 * max(host_memory.GROUP_BYTES, 2 * max(own, default=0)))
    batch = jax.tree.map(_spec, batch)
    placement = Placement(layout)
    function = StepFunction(model, model.train_step, placement)
    specs = tuple(state.values())
    traced = function.compiled.program(specs, [batch]).trace(specs, [batch])
    entry = layout.entry(jax.tree.leaves(batch))
    return TrainingProgram(
        lowered=traced.lower(),
        state_bytes=held,
        host_bytes=host_bytes,
        copied_bytes=copied,
        input_bytes=sum(_bytes_of(one, entry) for one in jax.tree.leaves(batch)),
        matmul_flops=dict(matmul_flops(traced.jaxpr)),
        logical_devices=layout.splits.logical_devices,
    )


@final
@dataclasses.dataclass(frozen=True)
class Compiled:
    """The result of compiling a program; all sizes are for a single device.

    Attributes:
        memory: How many bytes each kind of data needs, such as the parameters or the outputs. The
            outputs do not include the new state, which overwrites the old state.
        text: XLA's text of the compiled program; empty if XLA refused the program.
        refused: XLA's message if the program needs more memory than a device has, else None.
    """

    memory: Mapping[str, int]
    text: str = ""
    refused: str | None = None


def compiled(program: TrainingProgram) -> Compiled:
    """Compiles a program, without running it."""
    state = program.state_bytes
    memory = {
        "parameters": state["trainable"] + state["non_trainable"],
        "optimizer": state["optimizer"],
        "metrics": state["metrics"],
        # `fit` places a batch on accelerators during the previous step, so they hold two batches.
        "input": 2 * program.input_bytes,
        "activations and temporaries": program.copied_bytes,
        "outputs": 0,
        "program": 0,
    }
    try:
        executable = program.lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return Compiled(memory, refused=str(error))
    found = executable.memory_analysis()
    memory["activations and temporaries"] += found.temp_size_in_bytes
    memory["outputs"] = max(0, found.output_size_in_bytes - found.alias_size_in_bytes)
    memory["program"] = found.generated_code_size_in_bytes
    return Compiled(memory, executable.as_text())


def resized(batch: Any, examples: int) -> Any:
    """Returns the shapes that a batch would have with this number of examples."""

    def of(leaf: Any) -> Any:
        shape = (examples, *leaf.shape[1:]) if leaf.ndim else ()
        return jax.ShapeDtypeStruct(shape, _type(leaf))

    return jax.tree.map(of, batch)


def examples_in(batch: object) -> int:
    """Returns the number of examples of a global batch."""
    return max((leaf.shape[0] for leaf in jax.tree.leaves(batch) if leaf.ndim), default=1)


def _variables(model: Any) -> dict[str, list[Any]]:
    """Returns the variables of a model by kind: trainable, non_trainable, optimizer, metrics."""
    note_all(model.optimizer, model.trainable_variables)
    return {
        "trainable": list(model.trainable_variables),
        "non_trainable": list(model.non_trainable_variables),
        "optimizer": list(model.optimizer.variables),
        "metrics": list(model.metrics_variables),
    }


def _specs(variables: Sequence[keras.Variable], layout: Layout) -> list[Any]:
    pairs = zip(variables, layout.of_variables(variables), strict=True)
    return [jax.ShapeDtypeStruct(one.shape, _type(one), sharding=how) for one, how in pairs]


def _spec(leaf: Any) -> Any:
    return jax.ShapeDtypeStruct(leaf.shape, _type(leaf))


def _type(array: Any) -> Any:
    return jax.dtypes.canonicalize_dtype(array.dtype)


def _bytes_of(spec: Any, sharding: Any) -> int:
    return math.prod(sharding.shard_shape(spec.shape)) * spec.dtype.itemsize


@final
class PlanningBackend(JaxBackend):
    """The backend under which ``kerasdist plan`` runs a script.

    The script can make a model, but cannot train it, because the devices are only descriptions of
    accelerators. The script may name any devices, because its strategy always gets replicas on all
    described devices. A `sharding` or `offload` that the user gives to the plan replaces the
    argument of this name that the script gives to its strategy.
    """

    def __init__(
        self,
        devices: Sequence[Any],
        sharding: Sharding | None = None,
        offload: Offload | None = None,
    ) -> None:
        self._described = list(devices)
        self._sharding = sharding
        self._offload = offload

    def devices(self, kind: str) -> tuple[Device, ...]:
        """Returns the device names that a script may use."""
        return tuple(Device(kind, i) for i in range(max(_NAMED_DEVICES, len(self._described))))

    def make_cpu_devices(self, count: int) -> None:
        """Does nothing, because a planned script may name devices that were not made before."""

    def uses_gpus(self) -> None:
        """Returns None, because a plan uses no GPU of this machine."""

    def connect(self, job: Job, gpus: Sequence[int] | None = None) -> tuple[Device, ...]:
        """Returns no devices, and connects to no worker, because a plan runs no step."""
        return ()

    def replica_set(
        self, devices: Sequence[Device], options: ReplicaOptions, job: Job | None = None
    ) -> JaxReplicaSet:
        """Returns replicas on all described devices, with variables on this machine's CPU."""
        sharding = self._sharding or options.sharding
        if isinstance(sharding, Sharding) and sharding.within is not None:
            raise UnsupportedError(
                "Expected a sharding without `within` in a plan, which cannot predict how long "
                f"machines take to add up shards. Received: sharding={sharding}. Leave out "
                "`within`, and plan for one machine: on several machines, a device holds as much."
            )
        offload = (self._offload or options.offload) is not None
        options = dataclasses.replace(options, check="off", parameter_device=None, offload=None)
        here = jax.local_devices(backend="cpu")[:1]
        names = [Device("cpu", index) for index in range(len(self._described))]
        replicas = JaxReplicaSet(here, names, options)
        replicas.logical_devices = Layout(
            self._described, options.devices_per_replica, sharding, offload=offload
        )
        return replicas
