"""What PyTorch is: its devices, its compiler, its derivatives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import torch

from kerasdist.backends.base import Backend, ReplicaOptions, ReplicaSet
from kerasdist.backends.torch import creation, functions, states
from kerasdist.backends.torch.replicas import TorchReplicaSet
from kerasdist.backends.torch.workers.group import connect
from kerasdist.backends.torch.workers.replicas import WorkerReplicaSet
from kerasdist.collectives import CommunicationOptions
from kerasdist.devices import Device
from kerasdist.errors import DeviceError, UnsupportedError
from kerasdist.job.job import Job


@final
class TorchBackend(Backend):
    """PyTorch, with any number of logical devices on its one CPU."""

    name = "torch"

    def __init__(self) -> None:
        """Makes the backend, with one CPU device."""
        creation.install()
        self._cpu_devices = 1

    def devices(self, kind: str) -> tuple[Device, ...]:
        """Returns this machine's devices of one kind.

        Args:
            kind: ``"cpu"``, ``"gpu"`` (CUDA or ROCm) or ``"tpu"`` (none: see issue of torch_xla).
        """
        counts = {"cpu": self._cpu_devices, "gpu": torch.cuda.device_count()}
        return tuple(Device(kind, index) for index in range(counts.get(kind, 0)))

    def prepare_cpu_devices(self, count: int) -> None:
        """Makes sure that there are `count` logical CPU devices; any time will do.

        Args:
            count: How many there should be, at least 1. Devices that exist stay.
        """
        self._cpu_devices = max(self._cpu_devices, count)

    def random_state(self) -> str:
        """Returns the state of torch's generator on the host, from which samplers draw."""
        return states.random_state()

    def set_random_state(self, state: str) -> None:
        """Lets torch's generator go on from a state."""
        states.set_random_state(state)

    def own_random_states(self) -> list[str]:
        """Returns the states of the generators of this process's GPUs."""
        return states.gpu_random_states()

    def set_own_random_states(self, kept: list[str]) -> None:
        """Lets the generators of this process's GPUs go on from their states."""
        states.set_gpu_random_states(kept)

    def tpu_replica_set(self, resolver: Any, assignment: Any, spmd: bool) -> ReplicaSet:
        """Raises: PyTorch reaches TPUs by torch_xla alone, on which Keras does not run.

        Args:
            resolver: Where the TPUs are.
            assignment: How many replicas there are.
            spmd: Whether XLA is to divide the program.
        """
        del resolver, assignment, spmd
        raise UnsupportedError(
            "Expected TensorFlow or JAX, which compute on TPUs. Received: the backend torch, which "
            "would need torch_xla, and Keras does not run on it. Set KERAS_BACKEND=jax; on torch "
            "use kerasdist.MirroredStrategy on GPUs."
        )

    def replica_set(self, devices: Sequence[Device], options: ReplicaOptions) -> ReplicaSet:
        """Returns the means to compute on `devices`.

        Args:
            devices: Devices of this machine, none twice.
            options: How to compute.

        Raises:
            DeviceError: If CPU and GPU are mixed.
        """
        kinds = sorted({device.kind for device in devices})
        if len(kinds) > 1:
            raise DeviceError(
                "Expected devices of one kind. "
                f"Received: devices={[str(device) for device in devices]}. "
                "The slowest replica would set the pace: use the GPUs alone."
            )
        return TorchReplicaSet(devices, options)

    def connect(self, job: Job) -> None:
        """Makes torch's process group of all workers.

        Args:
            job: The job of this process.

        Raises:
            JobError: If there is another process group already.
        """
        connect(job)

    def worker_replica_set(
        self,
        devices: Sequence[Device],
        options: ReplicaOptions,
        job: Job,
        communication: CommunicationOptions,
    ) -> ReplicaSet:
        """Returns the means to compute on one device of each worker.

        Args:
            devices: This worker's device.
            options: How to compute.
            job: The job of this process.
            communication: How to communicate.

        Raises:
            UnsupportedError: If there are several devices.
        """
        return WorkerReplicaSet(devices, options, job, communication)

    def function(self, function: Callable[..., Any], jit_compile: bool) -> Callable[..., Any]:
        """Returns the function as a step, which ``torch.compile`` may compile.

        Args:
            function: The user's function.
            jit_compile: Whether to compile it, where there is one replica.
        """
        return functions.Step(function, jit_compile)

    def value_and_grad(
        self, function: Callable[[], Any], variables: Sequence[Any], has_aux: bool
    ) -> tuple[Any, list[Any]]:
        """Calls a function and differentiates its value by variables.

        Args:
            function: Takes nothing; returns a scalar, or with `has_aux` a pair of it and anything.
            variables: Keras variables.
            has_aux: Whether the function returns a pair.
        """
        return functions.value_and_grad(function, variables, has_aux)


BACKEND = TorchBackend()
