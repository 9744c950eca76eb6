"""PyTorch's `Backend`: its devices, compiled steps and gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, final

import keras
import torch

from kerasdist.backends.base.interface import (
    Backend,
    CheckpointFormat,
    Event,
    Profiler,
    ReplicaOptions,
    ReplicaSet,
    read_chrome_trace,
)
from kerasdist.backends.torch.fit.trainer import TorchTrainer
from kerasdist.backends.torch.replica import functions
from kerasdist.backends.torch.replica.replicas import TorchReplicaSet
from kerasdist.backends.torch.state import creation
from kerasdist.backends.torch.workers.process_group import connect
from kerasdist.core.devices import Device
from kerasdist.core.sharding import Sharding
from kerasdist.errors import DeviceError, UnsupportedError
from kerasdist.job.job import Job

_TRACE = "torch.json"


@final
class TorchProfiler(Profiler):
    """Records operations on the host and kernels on the GPUs, if there are GPUs."""

    def __init__(self) -> None:
        self._profile: Any = None

    def start(self, folder: Path) -> None:
        """Starts recording."""
        kinds = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            kinds.append(torch.profiler.ProfilerActivity.CUDA)
        self._profile = torch.profiler.profile(activities=kinds)
        self._profile.start()

    def marked(self, name: str) -> AbstractContextManager[Any]:
        """Returns a context whose block the profiler records as an event of this name."""
        return torch.profiler.record_function(name)

    def stop(self, folder: Path) -> Iterable[Event]:
        """Waits for the devices, stops recording, and returns the events."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._profile.stop()
        self._profile.export_chrome_trace(str(folder / _TRACE))
        return read_chrome_trace(folder / _TRACE)


@final
class TorchBackend(Backend):
    """The backend of PyTorch.

    It may have several logical CPU devices. All of them compute on torch's only CPU device.
    """

    name = "torch"
    profiler = TorchProfiler
    tpu_refusal = (
        "Expected TensorFlow or JAX, which compute on TPUs. Received: the backend torch, which "
        "would need torch_xla, and Keras does not run on it. Set KERAS_BACKEND=jax; on torch "
        "use kerasdist.MirroredStrategy on GPUs."
    )
    function = staticmethod(functions.Step)
    value_and_grad = staticmethod(functions.value_and_grad)

    def __init__(self) -> None:
        creation.install()
        self._cpu_devices = 1

    def devices(self, kind: str) -> tuple[Device, ...]:
        """Returns this machine's devices of one kind."""
        count = self._cpu_devices if kind == "cpu" else _count(kind)
        return tuple(Device(kind, index) for index in range(count))

    def uses_gpus(self) -> bool:
        """Returns whether torch is built for CUDA or for ROCm."""
        return torch.version.cuda is not None or torch.version.hip is not None

    def make_cpu_devices(self, count: int) -> None:
        """Increases the number of logical CPU devices to `count`, if there are fewer."""
        self._cpu_devices = max(self._cpu_devices, count)

    def replica_set(
        self, devices: Sequence[Device], options: ReplicaOptions, job: Job | None = None
    ) -> ReplicaSet:
        """Returns the replicas on `devices`; in a job each worker has one device."""
        kinds = sorted({device.kind for device in devices})
        if len(kinds) > 1:
            raise DeviceError(
                "Expected devices of one kind. "
                f"Received: devices={[str(device) for device in devices]}. "
                "All replicas would wait for the slowest device: use the GPUs alone."
            )
        if (job is not None or len(devices) > 1) and not {"cpu", "gpu"}.issuperset(kinds):
            raise UnsupportedError(
                "Expected one device, or several that kerasdist can combine on torch: CPUs, or "
                "GPUs of NVIDIA's or AMD's. Received: "
                f"devices={[str(device) for device in devices]}, on "
                f"{1 if job is None else job.num_workers} workers. Name one device, "
                f"{str(devices[0])!r}, with one worker; or set KERASDIST_CPU_DEVICES."
            )
        if options.sharding is not None:
            _check_sharding(options.sharding, devices, job)
        return TorchReplicaSet(devices, options, job, trainer_class=TorchTrainer)

    def connect(self, job: Job, gpus: Sequence[int] | None = None) -> tuple[Device, ...]:
        """Creates the process group of all workers; returns this worker's GPUs."""
        connect(job)
        return tuple(device for device in self.devices("gpu") if device.index in (gpus or ()))

    def count_flops(self, function: Callable[..., object], *arguments: object) -> float:
        """Returns how many floating-point operations a call of `function` needs.

        The call runs on torch's meta device, so it computes shapes but no values.
        """
        # imported here, because few programs need this module
        from torch.utils.flop_counter import FlopCounterMode

        def empty(one: keras.KerasTensor) -> torch.Tensor:
            return torch.empty(one.shape, dtype=getattr(torch, one.dtype), device="meta")

        meta = [keras.tree.map_structure(empty, each) for each in arguments]
        counter = FlopCounterMode(display=False)
        with torch.no_grad(), keras.device("meta"), counter:
            function(*meta)
        return counter.get_total_flops()

    def checkpoint_format(self) -> CheckpointFormat:
        """Returns the format of checkpoints, which is that of torch.distributed.checkpoint."""
        # imported here, because few programs need this module
        from kerasdist.backends.torch.checkpoints import DcpFormat

        return DcpFormat()


def _check_sharding(sharding: Any, devices: Sequence[Device], job: Job | None) -> None:
    is_map = not isinstance(sharding, Sharding)
    if job is None and (is_map or len(devices) > 1):
        size = math.prod(sharding.device_mesh.shape) if is_map else len(devices)
        divided = f"a LayoutMap over a mesh of {size} devices" if is_map else sharding
        raise UnsupportedError(
            "Expected one device per process, to divide state on PyTorch: the replicas of one "
            f"process share one optimizer. Received: {divided}, with devices="
            f"{[str(device) for device in devices]} in one process. Start a worker for each "
            f"device: kerasdist run --workers {size} script.py."
        )


def _count(kind: str) -> int:
    match kind:
        case "gpu":
            return torch.cuda.device_count()
        case "mps":
            return int(torch.backends.mps.is_available())
        case "xpu":
            return torch.xpu.device_count()
        case _:
            return 0


BACKEND = TorchBackend()
