"""The interfaces through which all other code of kerasdist uses a framework.

`Backend` gives access to a framework's devices, compiler and gradients. A `ReplicaSet` has the
devices of a strategy, and defines how `fit` computes on them. The `Runner` of a replica set runs
user functions on these devices, for custom loops. `Collectives` are the calls through which the
code of one replica exchanges data with the other replicas. `Runner` and `Collectives` have files of
their own. All other code reaches a framework only through these four classes and the objects that
they return. Code that imports a framework is in that framework's folder.
"""

from __future__ import annotations

import abc
import gzip
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from kerasdist.agreement.batches import FirstBatches
from kerasdist.agreement.results import InitialBroadcast, checksum_of
from kerasdist.api.options import CommunicationOptions
from kerasdist.backends.base.collectives import DEFAULT_COMMUNICATION
from kerasdist.backends.base.runner import Runner, SoleRunner
from kerasdist.core import gpus
from kerasdist.core.devices import ACCELERATORS, Device
from kerasdist.core.sharding import HeldShard, Offload
from kerasdist.errors import DeviceError, UnsupportedError
from kerasdist.job.job import Job
from kerasdist.keras_compat import ops

# The path of an array in the nested dictionaries of a checkpoint: one dictionary key per level.
Key = tuple[str, ...]

# An event of Chrome's trace format, with ``ts`` and ``dur`` in microseconds.
Event = dict[str, Any]

BatchNorm = Literal["synchronized", "per_replica"]
Check = Literal["off", "warn", "raise"]


@dataclass(frozen=True)
class ReplicaOptions:
    """The options of a strategy that say how its replicas compute.

    Attributes:
        batch_norm: ``"synchronized"``: BatchNormalization uses the mean and variance of the global
            batch. ``"per_replica"``: each replica uses the mean and variance of its own rows, and
            the moving statistics are averaged over the replicas. None: in `fit` the statistics are
            synchronized, and in custom loops each layer's argument ``synchronized`` decides.
        parameter_device: The device that holds the variables; None if the devices of the replicas
            hold them.
        devices_per_replica: How many devices a replica has.
        check: What to do if the first training step's results differ from the results on one
            device.
        sharding: Which variables are sharded: a `kerasdist.Sharding`, or a LayoutMap of Keras.
            None: no variables.
        communication: How workers communicate.
        offload: Which variables stay in the host's memory. ``"optimizer"``: the optimizer's
            variables. None: no variables.
    """

    batch_norm: BatchNorm | None = None
    parameter_device: Device | None = None
    devices_per_replica: int = 1
    check: Check = "warn"
    sharding: Any = None
    communication: CommunicationOptions = DEFAULT_COMMUNICATION
    offload: Offload | None = None


class Backend(abc.ABC):
    """A framework that Keras runs on.

    Attributes:
        name: The framework's name in Keras.
        profiler: The class of the framework's profiler.
        tpu_refusal: The error message for a user of `kerasdist.TPUStrategy`, if kerasdist does not
            support that strategy on this framework; None if it does.
    """

    name: str
    profiler: type[Profiler]
    tpu_refusal: str | None = None

    @abc.abstractmethod
    def devices(self, kind: str) -> tuple[Device, ...]:
        """Returns this machine's devices of one kind. This may start the framework's runtime.

        Args:
            kind: ``"cpu"``, or one of `kerasdist.core.devices.ACCELERATORS`.
        """

    def coordinates(self, kind: str) -> Sequence[Sequence[tuple[int, ...]]] | None:
        """Returns the coordinates of each process's devices in a TPU slice: x, y, z and core.

        Returns None if the devices are not in a TPU slice.

        Args:
            kind: The same as for `devices`.
        """
        return None

    def prepare_cpu_devices(self, count: int) -> None:
        """Makes `count` logical CPU devices, unless there are as many already.

        Args:
            count: The number of devices, at least 1.

        Raises:
            DeviceError: If the framework has already started with fewer devices.
        """
        try:
            self.make_cpu_devices(count)
        except RuntimeError as error:
            there = len(self.devices("cpu"))
            if there < count:
                raise DeviceError(
                    f"Expected {count} CPU devices, or a {self.name} that has not started yet, so "
                    f"that they can be made. Received: devices={there}. Call "
                    f"kerasdist.config.set_logical_cpu_devices({count}), or make the strategy, at "
                    "the top of the script: before the first model, tensor or random seed. Or set "
                    f"KERASDIST_CPU_DEVICES={count}."
                ) from error

    @abc.abstractmethod
    def make_cpu_devices(self, count: int) -> None:
        """Makes `count` logical CPU devices, unless there are as many already.

        Args:
            count: The number of devices, at least 1.

        Raises:
            RuntimeError: If the framework has already started, so that it can make no devices.
        """

    @abc.abstractmethod
    def uses_gpus(self) -> bool | None:
        """Returns whether the framework is built for GPUs, without starting the framework.

        Returns None if the user has restricted which GPUs the framework may use.
        """

    def settings(self) -> dict[str, Any]:
        """Returns the framework's settings that must be equal on all workers.

        The keys are the names of the settings. Each value has a type that JSON can express.
        """
        return {}

    @abc.abstractmethod
    def connect(self, job: Job, gpus: Sequence[int] | None = None) -> tuple[Device, ...]:
        """Connects the framework in this process with the frameworks of the job's other workers.

        All workers must call this method, before the framework starts.

        Args:
            job: The job of this process.
            gpus: The numbers of the GPUs that the framework shall use, in order. Empty: no GPU.
                None: all GPUs that the framework sees.

        Returns:
            The devices of `gpus`, in order, with the names that they have after this call. A GPU
            that the framework does not see is left out. Empty if `gpus` is None.

        Raises:
            JobError: If the framework has already started, or a worker cannot be reached in time.
        """

    @abc.abstractmethod
    def replica_set(
        self, devices: Sequence[Device], options: ReplicaOptions, job: Job | None = None
    ) -> ReplicaSet:
        """Returns a replica set on these devices and on the devices of the job's other workers.

        In a job all workers must call this method after `connect`, with equal numbers of devices.

        Args:
            devices: Devices of this process, each at most once.
            options: How the replicas compute.
            job: The job of this process; None if there are no other workers.

        Raises:
            UnsupportedError: If the framework does not support these devices or options.
        """

    @staticmethod
    @abc.abstractmethod
    def function(function: Callable[..., Any], jit_compile: bool) -> Callable[..., Any]:
        """Compiles a user function as the framework compiles a training step.

        Args:
            function: The user function; it may call `Strategy.run` and read and write variables.
            jit_compile: Whether to compile with XLA on TensorFlow, or with ``torch.compile`` on
                PyTorch. JAX always compiles with XLA.
        """

    @staticmethod
    @abc.abstractmethod
    def value_and_grad(
        function: Callable[[], tuple[Any, Any]], variables: Sequence[Any]
    ) -> tuple[tuple[Any, Any], list[Any]]:
        """Calls a function, and computes its first result's gradients with respect to variables.

        Args:
            function: Takes no argument and returns a pair of a scalar tensor and any other value.
            variables: Keras variables.

        Returns:
            The function's result, and one gradient per variable; None for a variable that the
            function did not read.
        """

    @abc.abstractmethod
    def count_flops(self, function: Callable[..., object], *arguments: object) -> float | None:
        """Counts the floating-point operations of matrix products and convolutions in a call.

        Nothing is computed, and the values of variables are not read.

        Args:
            function: A function of arrays that does not write to variables.
            arguments: The function's arguments, with a `keras.KerasTensor` instead of each array.

        Returns:
            The number of operations; None if the framework cannot count them.
        """

    def checkpoint_format(self) -> CheckpointFormat:
        """Returns the object that reads and writes the framework's usual checkpoints.

        These are Orbax's on JAX, and those of ``torch.distributed.checkpoint`` on PyTorch.

        Raises:
            UnsupportedError: If the backend has no such format, or a package is missing.
        """
        raise UnsupportedError(
            "Expected JAX or PyTorch, for Orbax's checkpoints or those of "
            f"torch.distributed.checkpoint. Received: the backend {self.name}. Save with "
            "model.save_weights, tf.train.Checkpoint(model=model) or "
            "kerasdist.callbacks.BackupAndRestore."
        )

    def accelerators(self) -> tuple[Device, ...]:
        """Returns this machine's TPUs, or its GPUs if it has no TPU; empty if it has neither."""
        return next((found for kind in ACCELERATORS if (found := self.devices(kind))), ())


# How many steps the host may start before an accelerator has finished the first of these steps.
_STEPS_AHEAD = 8


class ReplicaSet(abc.ABC):
    """The replicas of a strategy, their devices, and how to compute on them.

    Attributes:
        devices: The devices of this process, in the order of its replicas.
        variable_devices: The devices that hold the variables.
        options: How the replicas compute.
        job: The job whose workers hold the other replicas; None if there are no other workers.
        rank: The number of this worker, 0 without a job.
        num_workers: How many workers there are, 1 without a job.
        num_replicas: How many replicas there are, on all workers.
        local_replicas: The numbers of the replicas in this process.
        is_in_call: Whether all workers are inside a call of `fit`, `evaluate` or `predict`.
        batch_logs_matter: Whether a callback on any worker reads the logs of each batch in the
            current call of `fit`, `evaluate` or `predict`.
        reads_need_all_workers: Whether all workers must read a variable at the same time, because
            the read may exchange data. This is necessary if variables are sharded. It is also
            necessary after a custom loop, on a backend that combines the replicas' values only when
            they are read.
        measures_data: Whether the time that training waits for batches is measured.
        measures_collectives: Whether the host waits for the other workers in each collective, so
            that this time can be measured.
        steps_ahead: How many steps the host may start before the devices have finished the first of
            these steps.
        trainer_class: The class of the trainers of models that are made in the strategy's scope.
        logical_devices: An object that shards tensors and variables over the devices of a replica,
            for `kerasdist.TPUStrategy`; None if the backend has only replicas of one device.
        gradients_travel_as: The type to which workers cast gradients for sending; None for no cast.
        initial_broadcast: Gives new variables the chief's values before the next step.
        first_batches: Records the first batches that this worker has read, until the workers have
            compared them.
    """

    is_in_call = False
    batch_logs_matter = True
    measures_data = True
    measures_collectives = False
    trainer_class: type[Any]
    logical_devices: Any = None
    gradients_travel_as: str | None = None

    def __init__(
        self,
        devices: Sequence[Device],
        options: ReplicaOptions,
        job: Job | None = None,
        count_begun: Callable[[], int] | None = None,
    ) -> None:
        """Makes the replica set.

        Args:
            devices: Devices of this machine, each at most once.
            options: How to compute.
            job: The job of this process, if other workers hold replicas too.
            count_begun: A function that returns how many batches have been read so far. It is
                given if a compiled graph reads the batches, where Python code cannot count them.
        """
        self.devices = tuple(devices)
        home = options.parameter_device
        self.variable_devices = self.devices if home is None else (home,)
        self.steps_ahead = 1 if self.on_cpu else _STEPS_AHEAD
        self.options = options
        self.job = job
        self.reads_need_all_workers = self.divides_state
        self.rank, self.num_workers = (0, 1) if job is None else (job.rank, job.num_workers)
        here, each = len(self.devices), options.devices_per_replica
        self.num_replicas = self.num_workers * here // each
        # On PyTorch one replica may span several workers. Each of these workers counts the replica
        # as one of its local replicas.
        first = self.rank * here // each
        self.local_replicas = range(first, first + max(here // each, 1))
        self.initial_broadcast = InitialBroadcast(job, self.equalize)
        self.first_batches = FirstBatches(
            job, wanted=options.check != "off", count_begun=count_begun
        )

    @property
    def spans_workers(self) -> bool:
        """Whether one replica consists of the devices of several workers."""
        return self.options.devices_per_replica > len(self.devices)

    @property
    def divides_state(self) -> bool:
        """Whether each worker of the job may hold only a shard of a variable."""
        return self.job is not None and self.options.sharding is not None

    def begin_step(self) -> None:
        """Counts a step that needs all workers, and gives new variables the chief's values.

        Every step of `fit`, `evaluate` and `predict`, and every call of `run`, begins with this
        call. All workers must make this call. Without a job this method does nothing.
        """
        if self.job is not None:
            self.job.step_started()
            self.initial_broadcast.ensure()

    def equalize(self, variables: Sequence[Any]) -> None:
        """Gives variables the values that they have on the chief.

        All workers must call this method, with the same variables.

        Args:
            variables: Keras variables that have values.
        """
        del variables  # Without a job there is no other worker. For jobs a backend overrides this.

    def shards(self, variable: Any) -> Sequence[HeldShard]:
        """Returns this worker's shards of a variable; empty if workers do not shard the variable.

        The shards of the workers with the lowest ranks, in the order of the ranks, make up the
        whole variable. All other workers hold copies of these shards. This method exchanges no data
        with other workers.

        Args:
            variable: A Keras variable that has a value.
        """
        return ()

    def held(self, variable: Any) -> tuple[str, str, tuple[int, ...]]:
        """Returns how a variable is sharded and why, both in words, and the shape of one shard.

        The shape is that of the shard on one device. For a variable in the host's memory it is
        ``(0,)``, because no device holds any of its elements.

        Args:
            variable: A Keras variable.
        """
        why = "one replica" if self.num_replicas == 1 else "sharding=None"
        return "whole", why, tuple(variable.shape)

    def checksums(self, variables: Sequence[Any]) -> list[int]:
        """Returns a checksum of each variable's value on this worker.

        Args:
            variables: Keras variables that have values, and that are not sharded.
        """
        return [checksum_of(ops.convert_to_numpy(variable)) for variable in variables]

    @property
    def on_cpu(self) -> bool:
        """Whether all devices are CPUs."""
        return all(device.kind == "cpu" for device in self.devices)

    def free_bytes(self) -> int | None:
        """Returns how much memory is free on this process's fullest device; None if unknown."""
        return None

    def device_kind(self) -> str | None:
        """Returns the product name of the set's GPUs; None for CPUs, or if the names differ."""
        names = {one.name for one in gpus.visible()}
        is_known = self.devices[0].kind == "gpu" and len(names) == 1
        return names.pop() if is_known else None

    @cached_property
    def runner(self) -> Runner:
        """The runner that runs user functions on the devices of this set.

        This default is for a set of one device. A backend overrides it for sets of several devices.
        """
        return SoleRunner(self.placement)

    @abc.abstractmethod
    def data_adapter(self, adapter: Any) -> Any:
        """Returns a Keras data adapter that yields global batches in the form that trainers expect.

        Args:
            adapter: The adapter that Keras made for the data of a call of `fit`, `evaluate` or
                `predict`.
        """

    def is_tracing(self) -> bool:
        """Returns whether the framework is tracing the calling code for its compiler."""
        return False

    @abc.abstractmethod
    def placement(self) -> AbstractContextManager[Any]:
        """Returns a context in which new variables are put on the devices that shall hold them."""


class CheckpointFormat(abc.ABC):
    """Writes and reads a tree of variables as a checkpoint of one library.

    All workers must call `save` and `load` together, each with the whole tree.

    Attributes:
        marker: The name of a file that each complete checkpoint contains.
    """

    marker: str

    def folder_in(self, path: Path) -> Path | None:
        """Returns the folder with the arrays of a checkpoint; None if there is no checkpoint.

        Args:
            path: The checkpoint's folder.
        """
        return path if (path / self.marker).is_file() else None

    @abc.abstractmethod
    def shapes(self, path: str) -> Mapping[Key, tuple[int, ...]]:
        """Returns the shapes of a checkpoint's arrays, without reading the arrays.

        Args:
            path: The folder with the arrays, as a path or a URL.
        """

    def lacking(self, path: str, wanted: Mapping[Key, str]) -> list[str]:
        """Describes each array in `wanted` that is damaged: its file is missing or too short.

        Returns an empty list on JAX, where the sizes of files do not show which arrays are damaged.

        Args:
            path: The folder with the arrays, as a path or a URL.
            wanted: For each array's key, the path of the variable that gets the array.
        """
        return []

    @abc.abstractmethod
    def save(self, path: str, tree: Mapping[str, Any], replicas: ReplicaSet | None) -> None:
        """Writes variables as a checkpoint.

        Args:
            path: A folder that does not exist yet, as a path or a URL.
            tree: Nested dictionaries of Keras variables.
            replicas: The replicas that hold the variables; None without a strategy.
        """

    @abc.abstractmethod
    def load(
        self, path: str, wanted: Sequence[tuple[Key, Any]], replicas: ReplicaSet | None
    ) -> None:
        """Assigns a checkpoint's values to variables; each value is cast to its variable's type.

        Args:
            path: The folder with the arrays, as a path or a URL.
            wanted: Pairs of an array's key and the variable that gets the array's values.
            replicas: The same as for `save`.
        """


class Profiler(abc.ABC):
    """Records what the process and its devices do."""

    @abc.abstractmethod
    def start(self, folder: Path) -> None:
        """Starts recording.

        Args:
            folder: An empty folder for the framework's own files.
        """

    @abc.abstractmethod
    def marked(self, name: str) -> AbstractContextManager[Any]:
        """Returns a context that is recorded as an event of this name.

        Args:
            name: The event's name.
        """

    @abc.abstractmethod
    def stop(self, folder: Path) -> Iterable[Event]:
        """Stops recording; returns the events, with times by the profiler's own clock.

        Args:
            folder: The folder that `start` got.
        """


def read_chrome_trace(path: Path) -> list[Event]:
    """Returns the events of a file in Chrome's trace format, compressed or not."""
    content = path.read_bytes()
    trace = json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)
    return [one for one in trace["traceEvents"] if "ph" in one]  # skips XLA's empty last event
