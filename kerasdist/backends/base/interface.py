"""The narrow waist: the interfaces through which kerasdist uses a framework.

`Backend` gives access to a framework's devices, compiler and gradients. A `ReplicaSet` is a choice
of devices, and how `fit` computes on them; its `Runner` runs user functions there, for custom
loops. `Collectives` are the calls by which the code of one replica reaches the others. `Runner` and
`Collectives` have files of their own beside this one. All other code reaches a framework through
these four. Code that imports a framework is in that framework's folder.
"""

from __future__ import annotations

import abc
import gzip
import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kerasdist.agreement.batches import FirstBatches
from kerasdist.agreement.results import InitialBroadcast, checksum_of
from kerasdist.api.options import CommunicationOptions
from kerasdist.backends.base.collectives import DEFAULT_COMMUNICATION
from kerasdist.backends.base.runner import Runner
from kerasdist.backends.base.trial import Trial
from kerasdist.core import gpus
from kerasdist.core.devices import ACCELERATORS, Device
from kerasdist.core.sharding import HeldShard
from kerasdist.errors import UnsupportedError
from kerasdist.job.job import Job
from kerasdist.keras_compat import ops

# An event of Chrome's trace format, with ``ts`` and ``dur`` in microseconds.
Event = dict[str, Any]

BatchNorm = Literal["synchronized", "per_replica"]
Check = Literal["off", "warn", "raise"]


@dataclass(frozen=True)
class ReplicaOptions:
    """How a strategy wants its replicas to compute.

    Attributes:
        batch_norm: ``"synchronized"``: BatchNormalization uses the mean and variance of the global
            batch. ``"per_replica"``: each replica uses its own, and the moving statistics are
            averaged. None: synchronized in `fit`, in custom loops as each layer says.
        parameter_device: The device that holds the variables; None: every replica's device.
        devices_per_replica: How many devices a replica has.
        check: What to do if the first training step differs from that of one device.
        sharding: Which variables are sharded: a `kerasdist.Sharding`, or a LayoutMap of Keras.
        communication: How workers communicate.
    """

    batch_norm: BatchNorm | None = None
    parameter_device: Device | None = None
    devices_per_replica: int = 1
    check: Check = "warn"
    sharding: Any = None
    communication: CommunicationOptions = DEFAULT_COMMUNICATION


class Backend(abc.ABC):
    """A framework that Keras runs on.

    Attributes:
        name: The framework's name in Keras.
        tpu_refusal: The error message if `kerasdist.TPUStrategy` does not run on it, else None.
    """

    name: str
    tpu_refusal: str | None = None

    @abc.abstractmethod
    def devices(self, kind: str) -> tuple[Device, ...]:
        """Returns this machine's devices of one kind, starting the framework if need be.

        Args:
            kind: ``"cpu"``, or one of `kerasdist.core.devices.ACCELERATORS`.
        """

    def coordinates(self, kind: str) -> Sequence[Sequence[tuple[int, ...]]] | None:
        """Returns where the devices of each process are in a TPU slice: x, y, z and the core.

        None: they are in none.

        Args:
            kind: As in `devices`.
        """
        return None

    @abc.abstractmethod
    def prepare_cpu_devices(self, count: int) -> None:
        """Makes `count` logical CPU devices, before the framework starts.

        Args:
            count: How many there should be, at least 1.

        Raises:
            DeviceError: If the framework has started with fewer.
        """

    @abc.abstractmethod
    def uses_gpus(self) -> bool | None:
        """Returns whether the framework is built for GPUs. Does not start it.

        None: the user has configured which GPUs the framework takes.
        """

    def settings(self) -> dict[str, Any]:
        """Returns the framework's settings that decide what all workers run, as JSON by name."""
        return {}

    @abc.abstractmethod
    def connect(self, job: Job, gpus: Sequence[int] | None = None) -> tuple[Device, ...]:
        """Connects the workers' frameworks with each other, before they start.

        All workers must call it.

        Args:
            job: The job of this process.
            gpus: The numbers of those that the framework is to use, in order; none, if it is empty.
                None: all that it sees.

        Returns:
            Those GPUs, in order, by the names that they have now; without those that the framework
            does not see. Empty for None.

        Raises:
            JobError: If the framework has started, or a worker cannot be reached in time.
        """

    @abc.abstractmethod
    def replica_set(
        self, devices: Sequence[Device], options: ReplicaOptions, job: Job | None = None
    ) -> ReplicaSet:
        """Returns a replica set on these devices and on those of the job's other workers.

        With a job, all workers must call it after `connect`, with equally many devices.

        Args:
            devices: Devices of this process, none twice.
            options: How the replicas compute.
            job: The job of this process; None: there are no other workers.

        Raises:
            UnsupportedError: If the framework does not support these devices or options.
        """

    @abc.abstractmethod
    def function(self, function: Callable[..., Any], jit_compile: bool) -> Callable[..., Any]:
        """Compiles a user function as the framework compiles a training step.

        Args:
            function: The user function; it may call `Strategy.run` and read and write variables.
            jit_compile: Whether to use the framework's JIT compiler, where that is not the default.
        """

    @abc.abstractmethod
    def value_and_grad(
        self, function: Callable[[], Any], variables: Sequence[Any], has_aux: bool
    ) -> tuple[Any, list[Any]]:
        """Calls a function and computes the gradients of its value by variables.

        Args:
            function: Takes no arguments; returns a scalar, with `has_aux` a pair of a scalar and
                anything.
            variables: Keras variables.
            has_aux: Whether the function returns a pair.

        Returns:
            The function's result, and one gradient per variable, None for a variable that the
            function did not read.
        """

    @abc.abstractmethod
    def count_flops(self, function: Callable[..., object], *arguments: object) -> float | None:
        """Counts the floating-point operations of matrix products and convolutions in a call.

        Nothing is computed, and no variable's value is read.

        Args:
            function: A function of arrays that writes no variable.
            arguments: Structures of `keras.KerasTensor` in place of the arrays.

        Returns:
            The number; None if the framework cannot tell.
        """

    @abc.abstractmethod
    def profiler(self) -> Profiler:
        """Returns the framework's profiler, which records what the process and its devices do."""

    def accelerators(self) -> tuple[Device, ...]:
        """Returns this machine's TPUs; without TPUs, its GPUs; without either, nothing."""
        return next((found for kind in ACCELERATORS if (found := self.devices(kind))), ())


# How many steps the host starts ahead of an accelerator; meters time so many steps as one.
_STEPS_AHEAD = 8


class ReplicaSet(abc.ABC):
    """The replicas of a strategy, their devices, and how to compute on them.

    Attributes:
        devices: The devices of this process, in the order of its replicas.
        variable_devices: Those that hold the variables.
        options: How the replicas compute.
        job: The job whose workers hold the other replicas; None: there are no others.
        rank: The number of this worker, 0 without a job.
        num_workers: How many workers there are, 1 without a job.
        num_replicas: How many replicas there are, on all workers.
        local_replicas: The numbers of those in this process.
        is_in_call: Whether all workers are in a call of `fit`, `evaluate` or `predict`.
        batch_logs_matter: Whether a callback of any worker reads each batch's logs, in that call.
        reads_need_all_workers: Whether reading a variable may be a collective: after a custom loop,
            on a backend whose steps do not combine what replicas have assigned.
        measures_data: Whether it is known how long training waits for batches.
        measures_collectives: Whether the host waits for the other workers in each collective, so
            that it is known how long.
        steps_ahead: How many steps the host may be ahead of the devices.
        trainer_class: The class of the trainer that stands beside each model made in a scope.
        logical_devices: How a replica of several devices divides tensors and variables among them,
            with the methods of `kerasdist.TPUStrategy`; None: the backend has no such replicas.
        gradients_travel_as: The type to which gradients are cast between workers; None: not cast.
        initial_broadcast: The new variables that workers have not compared yet.
        first_batches: What workers have not compared yet of the batches that they have read.
    """

    is_in_call = False
    batch_logs_matter = True
    reads_need_all_workers = False
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
        """Makes the set.

        Args:
            devices: Devices of this machine, none twice.
            options: How to compute.
            job: The job of this process, if other workers hold replicas too.
            count_begun: Returns how many batches have been read so far, where only a compiled
                graph can count them.
        """
        self.devices = tuple(devices)
        home = options.parameter_device
        self.variable_devices = self.devices if home is None else (home,)
        self.steps_ahead = 1 if self.on_cpu else _STEPS_AHEAD
        self.options = options
        self.job = job
        here = len(self.devices) // options.devices_per_replica
        self.rank, self.num_workers = (0, 1) if job is None else (job.rank, job.num_workers)
        self.num_replicas = self.num_workers * here
        self.local_replicas = range(self.rank * here, (self.rank + 1) * here)
        self.initial_broadcast = InitialBroadcast(job, self.equalize)
        self.first_batches = FirstBatches(
            job, wanted=options.check != "off", count_begun=count_begun
        )

    @property
    def divides_state(self) -> bool:
        """Whether the workers of a job may each hold a part of a variable."""
        return self.job is not None and self.options.sharding is not None

    def begin_step(self) -> None:
        """Counts a step that needs all workers, and gives new variables the chief's values.

        Every step of `fit`, `evaluate` and `predict`, and every call of `run`, begins with it. All
        workers must call it. Without a job it does nothing.
        """
        if self.job is not None:
            self.job.step_started()
            self.initial_broadcast.ensure()

    def equalize(self, variables: Sequence[Any]) -> None:
        """Gives variables the values that they have on the chief.

        All workers must call it, with the same variables.

        Args:
            variables: Keras variables that have values.
        """
        del variables  # without a job there are no other workers

    def shards(self, variable: Any) -> Sequence[HeldShard]:
        """Returns what this worker holds of a variable that the workers divide; else nothing.

        Taken by rank, the shards of the first workers cover the variable; those of further workers
        repeat them. The call needs no other worker.

        Args:
            variable: A Keras variable that has a value.
        """
        return ()

    def held(self, variable: Any) -> tuple[str, str, tuple[int, ...]]:
        """Returns how a variable is divided, and why, in words, and the shape of a device's part.

        Args:
            variable: A Keras variable.
        """
        why = "one replica" if self.num_replicas == 1 else "sharding=None"
        return "whole", why, tuple(variable.shape)

    def checksums(self, variables: Sequence[Any]) -> list[int]:
        """Returns a checksum of each variable's value on this worker.

        Args:
            variables: Keras variables that have values, each whole on every worker.
        """
        return [checksum_of(ops.convert_to_numpy(variable)) for variable in variables]

    @property
    def trial_class(self) -> type[Trial]:
        """The class that takes a training step on trial, on one device and on these, to compare.

        Raises:
            UnsupportedError: If there is one device, so that there is nothing to compare.
        """
        raise UnsupportedError(
            "Expected a strategy of several devices, to compare it with one device. Received: a "
            f"model made under one of devices={[str(device) for device in self.devices]}. There is "
            "nothing to compare."
        )

    @property
    def on_cpu(self) -> bool:
        """Whether all devices are CPUs."""
        return all(device.kind == "cpu" for device in self.devices)

    def free_bytes(self) -> int | None:
        """Returns how much memory is free on the fullest device here; None if that is unknown."""
        return None

    def device_kind(self) -> str | None:
        """Returns what the maker calls these devices; None for CPUs, and if they differ."""
        names = {one.name for one in gpus.visible()}
        is_known = self.devices[0].kind == "gpu" and len(names) == 1
        return names.pop() if is_known else None

    @property
    @abc.abstractmethod
    def runner(self) -> Runner:
        """The runner that runs user functions on these devices."""

    @abc.abstractmethod
    def data_adapter(self, adapter: Any) -> Any:
        """Returns a Keras data adapter that yields global batches as `trainer_class` takes them.

        Args:
            adapter: The adapter that Keras made for the data of a call of `fit`, `evaluate`,
                `predict`.
        """

    def is_tracing(self) -> bool:
        """Returns whether the code that calls is traced: what it reads of Python is a constant."""
        return False

    @abc.abstractmethod
    def placement(self) -> AbstractContextManager[Any]:
        """Returns a context in which variables are made on the devices that are to hold them."""


class Profiler(abc.ABC):
    """Records what the process and its devices do."""

    @abc.abstractmethod
    def start(self, folder: Path) -> None:
        """Starts to record.

        Args:
            folder: An empty folder for the framework's own files.
        """

    @abc.abstractmethod
    def marked(self, name: str) -> AbstractContextManager[Any]:
        """Returns a context that is an event of this name.

        Args:
            name: The name.
        """

    @abc.abstractmethod
    def stop(self, folder: Path) -> Iterable[Event]:
        """Stops, and returns the events, by the profiler's own clock.

        Args:
            folder: That of `start`.
        """


def read_chrome_trace(path: Path) -> list[Event]:
    """Returns the events of a file in Chrome's trace format, compressed or not."""
    content = path.read_bytes()
    trace = json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)
    return [one for one in trace["traceEvents"] if "ph" in one]  # XLA's last one is empty
