"""What PyTorch is: its devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch

from kerasdist.backends.base import Backend, ReplicaOptions, ReplicaSet
from kerasdist.backends.torch.replicas import TorchReplicaSet
from kerasdist.devices import Device
from kerasdist.errors import DeviceError


@final
class TorchBackend(Backend):
    """PyTorch, with any number of logical devices on its one CPU."""

    name = "torch"

    def __init__(self) -> None:
        """Makes the backend, with one CPU device."""
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


BACKEND = TorchBackend()
