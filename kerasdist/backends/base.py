"""The narrow waist: what kerasdist needs to know of a framework.

`Backend` is what a framework is: its devices, its compiler, its derivatives. `ReplicaSet` is a
choice of devices and how `fit` computes on them; its `Runner` is how user functions run
there, for custom loops. `Collectives` is what one replica's code can ask of the others; both have a
file of their own beside this one. Everything above speaks to these four; everything that names a
framework stands below them, in a folder of its own.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from kerasdist.backends.equal_start import EqualStart
from kerasdist.backends.first_batches import FirstBatches
from kerasdist.collectives import CommunicationOptions
from kerasdist.devices import Device
from kerasdist.errors import UnsupportedError
from kerasdist.input.batch_forms import Course

if TYPE_CHECKING:
    from kerasdist.backends.runner import Runner
    from kerasdist.backends.trial import Trial
    from kerasdist.job.job import Job

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
        check: What to do where the first training step is not that of one device.
    """

    batch_norm: BatchNorm | None = None
    parameter_device: Device | None = None
    devices_per_replica: int = 1
    check: Check = "warn"


def checked_batch_norm(batch_norm: BatchNorm | None) -> BatchNorm | None:
    """Returns the argument of a strategy, if it is one of the choices.

    Args:
        batch_norm: What the user asks for.

    Raises:
        ValueError: If it is not.
    """
    if batch_norm is not None and batch_norm not in get_args(BatchNorm):
        raise ValueError(
            f"Expected batch_norm to be None or one of {list(get_args(BatchNorm))}. "
            f"Received: batch_norm={batch_norm!r}."
        )
    return batch_norm


class Backend(abc.ABC):
    """What a framework is."""

    name: str

    @abc.abstractmethod
    def devices(self, kind: str) -> tuple[Device, ...]:
        """Returns this machine's devices of one kind, starting the framework if need be.

        Args:
            kind: ``"cpu"``, ``"gpu"`` or ``"tpu"``.
        """

    @abc.abstractmethod
    def prepare_cpu_devices(self, count: int) -> None:
        """Makes `count` logical CPU devices, as far as the framework has not started.

        Args:
            count: How many there should be, at least 1.

        Raises:
            DeviceError: If the framework has started with fewer.
        """

    @abc.abstractmethod
    def tpu_replica_set(self, resolver: Any, assignment: Any, spmd: bool) -> ReplicaSet:
        """Returns the means to compute on TPUs, or on what stands in for them.

        Args:
            resolver: Where the TPUs are; None where the framework finds them.
            assignment: How many replicas there are, and devices of each; None: one device each.
            spmd: Whether XLA is to divide the program.

        Raises:
            UnsupportedError: If the framework has no TPUs.
            DeviceError: If there are not enough devices.
        """

    @abc.abstractmethod
    def replica_set(self, devices: Sequence[Device], options: ReplicaOptions) -> ReplicaSet:
        """Returns the means to compute on `devices`, one replica each.

        Args:
            devices: Devices of this machine, none twice.
            options: How to compute.

        Raises:
            UnsupportedError: If the framework cannot have what `options` ask for.
        """

    @abc.abstractmethod
    def connect(self, job: Job) -> None:
        """Lets the workers' engines find each other, before the framework starts.

        All workers must call it.

        Args:
            job: The job of this process.

        Raises:
            JobError: If the framework has started, or a worker cannot be reached in time.
        """

    @abc.abstractmethod
    def worker_replica_set(
        self,
        devices: Sequence[Device],
        options: ReplicaOptions,
        job: Job,
        communication: CommunicationOptions,
    ) -> ReplicaSet:
        """Returns the means to compute on `devices` of each worker, one replica each.

        All workers must call it, after `connect`, with as many devices.

        Args:
            devices: Devices of this worker, none twice.
            options: How to compute.
            job: The job of this process.
            communication: How to communicate.

        Raises:
            UnsupportedError: If the framework cannot have what is asked for.
        """

    @abc.abstractmethod
    def function(self, function: Callable[..., Any], jit_compile: bool) -> Callable[..., Any]:
        """Returns a function that does the same, compiled as the framework compiles a step.

        Args:
            function: The user's function; it may call `Strategy.run` and read and write variables.
            jit_compile: Whether to compile further than the framework does by default.
        """

    @abc.abstractmethod
    def value_and_grad(
        self, function: Callable[[], Any], variables: Sequence[Any], has_aux: bool
    ) -> tuple[Any, list[Any]]:
        """Calls a function and differentiates its value by variables.

        Args:
            function: Takes nothing; returns a scalar, or with `has_aux` a pair of it and anything.
            variables: Keras variables.
            has_aux: Whether the function returns a pair.

        Returns:
            What the function returned, and one gradient a variable, None for a variable that the
            function did not read.
        """

    def random_state(self) -> str:
        """Returns the state of the framework's own generator that shuffles data, as text."""
        return ""

    def set_random_state(self, state: str) -> None:
        """Lets that generator go on from a state.

        Args:
            state: What `random_state` returned.
        """
        del state

    @property
    def reads_ahead(self) -> bool:
        """Whether Keras's loop asks for batches before the steps that take them."""
        return False

    def own_random_states(self) -> list[str]:
        """Returns the states of generators that differ by worker, as text."""
        return []

    def set_own_random_states(self, kept: list[str]) -> None:
        """Lets those generators go on from their states.

        Args:
            kept: What `own_random_states` returned on this worker.
        """
        del kept

    def accelerators(self) -> tuple[Device, ...]:
        """Returns this machine's accelerators: its TPUs, else its GPUs, else none."""
        return self.devices("tpu") or self.devices("gpu")


class LogicalDevices(abc.ABC):
    """The devices of one replica, where it has several; see `kerasdist.TPUStrategy`."""

    @abc.abstractmethod
    def split(self, tensor: Any, pieces: Sequence[int]) -> Any:
        """Cuts a tensor of a step over the devices.

        Args:
            tensor: The tensor.
            pieces: Number of pieces along each axis.
        """

    @abc.abstractmethod
    def assign(self, tensor: Any, device: int) -> Any:
        """Gives the computation of a tensor to one of the devices.

        Args:
            tensor: The tensor.
            device: The device's number.
        """

    @abc.abstractmethod
    def replicate(self, tensor: Any) -> Any:
        """Keeps a tensor of a step whole on each of the devices.

        Args:
            tensor: The tensor.
        """

    @abc.abstractmethod
    def split_variables(self, rules: Mapping[str, Sequence[int]]) -> None:
        """Cuts variables over the devices.

        Args:
            rules: Patterns of paths, and the number of pieces along each axis.
        """


class ReplicaSet(abc.ABC):
    """Devices, one replica on each, and how to compute on them.

    Attributes:
        devices: The devices of this process, its first replica's first.
        options: How the replicas compute.
        job: The job whose workers hold the other replicas; None: there are no others.
        batch_logs_matter: Whether anybody looks at the logs of a batch, in the call of `fit` or
            `evaluate` that runs.
        equal_start: The variables that workers have not compared yet.
        course: The global batches that workers have not compared yet.
        first_batches: The first batches of iterations, likewise.
    """

    batch_logs_matter = True

    def __init__(
        self, devices: Sequence[Device], options: ReplicaOptions, job: Job | None = None
    ) -> None:
        """Makes the set.

        Args:
            devices: Devices of this machine, none twice.
            options: How to compute.
            job: The job of this process, if other workers hold replicas too.
        """
        self.devices = tuple(devices)
        self.options = options
        self.job = job
        self.equal_start = EqualStart(self)
        self.course = Course()
        self.first_batches = FirstBatches(job, wanted=options.check != "off")

    @property
    def num_replicas(self) -> int:
        """How many replicas there are, on all workers."""
        workers = 1 if self.job is None else self.job.num_workers
        return workers * self._replicas_here

    @property
    def local_replicas(self) -> range:
        """The numbers of the replicas in this process."""
        first = 0 if self.job is None else self.job.rank * self._replicas_here
        return range(first, first + self._replicas_here)

    @property
    def _replicas_here(self) -> int:
        return len(self.devices) // self.options.devices_per_replica

    def device_of(self, replica: int) -> Device | None:
        """Returns the first device of a replica, None for a replica of another process.

        Args:
            replica: The replica's number.
        """
        here = self.local_replicas
        if replica not in here:
            return None
        return self.devices[(replica - here.start) * self.options.devices_per_replica]

    def begin_step(self) -> None:
        """Notes that a step begins that needs all workers, and lets new variables start equal.

        Every step of `fit`, `evaluate` and `predict`, and every call of `run`, begins with it. All
        workers must call it. In a process that is alone it does nothing.
        """
        if self.job is not None:
            self.job.tick()
            self.equal_start.ensure()

    def calling(self) -> AbstractContextManager[None]:
        """Returns a context for a call of Keras's `fit`, `evaluate` or `predict`."""
        return nullcontext()

    def leaving(self) -> AbstractContextManager[None]:
        """Returns a context in which this thread is outside of `placement`."""
        return nullcontext()

    def equalize(self, variables: Sequence[Any]) -> None:
        """Gives variables the values that they have on the chief.

        All workers must call it, with the same variables.

        Args:
            variables: Keras variables that have values.
        """
        del variables  # in one process there is nobody to differ from

    def checksums(self, variables: Sequence[Any]) -> list[int]:
        """Returns a checksum of each variable's value on this worker.

        Args:
            variables: Keras variables that have values, each whole on every worker.
        """
        raise NotImplementedError  # asked where there are other workers

    def trial(self, model: Any) -> Trial:
        """Returns what a training step of a model is tried with, alone and on these devices.

        Args:
            model: A model with the trainer of `trainer_class`, built.

        Raises:
            UnsupportedError: If there is one device, so that there is nothing to compare.
        """
        raise UnsupportedError(
            "Expected a strategy of several devices, to compare it with one device. Received: "
            f"model={model.name!r}, made under one of devices="
            f"{[str(device) for device in self.devices]}. There is nothing to compare."
        )

    @property
    def gradients_travel_as(self) -> str | None:
        """The type in which gradients travel between workers; None: in their own."""
        return None

    def begin_training(self, model: Any) -> None:
        """Forgets batches that were not trained on in this call of `fit`.

        Args:
            model: The model that is trained.
        """
        del model
        self.course.clear()
        if self.job is not None:
            self.job.report_batches(self.course.report)

    def take_on(self, model: Any) -> None:
        """Prepares a model of no strategy that shares layers with one of this for plain training.

        Args:
            model: The model.
        """
        del model  # most frameworks need nothing

    def trained_on(self, model: Any) -> list[list[Any]]:
        """Returns the global batches since the last call, as this worker saw them.

        Args:
            model: The model that was trained.

        Returns:
            Pairs of a number of batches and the form that they had, in their order.
        """
        del model
        runs = self.course.runs()
        self.course.clear()
        return runs

    @property
    def logical_devices(self) -> LogicalDevices:
        """The devices of one replica, of a set that `Backend.tpu_replica_set` made."""
        raise UnsupportedError(
            "Expected replicas that may have several devices. Received: "
            f"devices={[str(device) for device in self.devices]}, one each. Use "
            "kerasdist.TPUStrategy."
        )

    @property
    def variable_devices(self) -> tuple[Device, ...]:
        """The devices that hold the variables."""
        home = self.options.parameter_device
        return self.devices if home is None else (home,)

    @property
    @abc.abstractmethod
    def trainer_class(self) -> type[Any]:
        """The class that is put before a model's own, so that its steps run on the replicas."""

    @property
    @abc.abstractmethod
    def runner(self) -> Runner:
        """How user functions run on these devices."""

    @abc.abstractmethod
    def data_adapter(self, adapter: Any) -> Any:
        """Returns a Keras data adapter that yields global batches as `trainer_class` takes them.

        Args:
            adapter: The adapter that Keras made for the data of a call of `fit`, `evaluate`,
                `predict`.
        """

    def following(self, dataset: Any, begin: Callable[[Callable[[], Any]], Any]) -> Any:
        """Returns what TensorFlow's loop iterates over, each iteration begun by a function.

        Args:
            dataset: What `data_adapter` yields for that loop.
            begin: Is given what makes an iterator, and returns one.
        """
        del begin
        return dataset

    @abc.abstractmethod
    def placement(self) -> AbstractContextManager[Any]:
        """Returns a context in which variables are made where and as the replicas need them."""
