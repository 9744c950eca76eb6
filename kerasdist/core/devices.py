"""Names of devices, in Keras's spelling (``cpu:0``, ``gpu:1``, ``tpu:0``) and in TensorFlow's."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

from kerasdist.errors import DeviceError

_KINDS = {"cpu": "cpu", "gpu": "gpu", "cuda": "gpu", "tpu": "tpu", "mps": "mps", "xpu": "xpu"}

ACCELERATORS = ("tpu", "gpu", "xpu", "mps")
"""The kinds of devices that a strategy prefers to CPUs, the most preferred kind first."""

# Matches names from plain "gpu" to "/job:localhost/replica:0/task:0/device:GPU:1".
_NAME = re.compile(
    r"(?:/job:\w+)?(?:/replica:\d+)?(?:/task:\d+)?/?(?:device:)?(cpu|gpu|cuda|tpu|mps|xpu)(?::(\d+))?",
    re.IGNORECASE,
)


@dataclass(frozen=True, order=True)
class Device:
    """One device of this machine.

    Attributes:
        kind: ``"cpu"``, ``"gpu"`` or ``"tpu"``; on PyTorch also ``"mps"`` (Apple's GPUs) and
            ``"xpu"`` (Intel's).
        index: The device's number among the devices of its kind.
    """

    kind: str
    index: int

    def __str__(self) -> str:
        return f"{self.kind}:{self.index}"


def parse_device(name: object) -> Device:
    """Returns the `Device` that a name stands for."""
    if isinstance(name, Device):
        return name
    match = _NAME.fullmatch(name) if isinstance(name, str) else None
    if match is None:
        raise DeviceError(
            "Expected the name of a device, such as 'cpu:0', 'gpu:1' or '/device:GPU:1'. "
            f"Received: device={name!r}. {_hint(name)}"
        )
    return Device(_KINDS[match.group(1).lower()], int(match.group(2) or 0))


def _hint(name: object) -> str:
    if isinstance(name, int):
        return f"Did you mean 'gpu:{name}'? Name a device by its kind and its number."
    if isinstance(name, str) and "," in name:
        return f"Give a list: {[part.strip() for part in name.split(',')]}."
    return "Name a device by its kind and its number."


def parse_devices(names: Any) -> tuple[Device, ...]:
    """Returns the devices that names stand for, in order; refuses an empty list and duplicates."""
    if isinstance(names, str | Device):
        names = [names]
    if not isinstance(names, Iterable):
        raise DeviceError(
            f"Expected a list of the names of devices. Received: devices={names!r:.200}. For 2 "
            "replicas name 2 devices: ['gpu:0', 'gpu:1'], or of another kind; or pass None for all "
            "devices of this machine."
        )
    devices = tuple(map(parse_device, cast("Iterable[Any]", names)))
    if not devices:
        raise DeviceError(
            "Expected at least one device. Received: devices=[]. "
            "Pass devices=None to use every device of this machine."
        )
    repeated = sorted({str(device) for device in devices if devices.count(device) > 1})
    if repeated:
        raise DeviceError(
            f"Expected every device once. Received: devices={[str(d) for d in devices]}, "
            f"with {', '.join(repeated)} more than once. For several replicas on the CPU name "
            "'cpu:0', 'cpu:1' and so on."
        )
    return devices


GPU_BUILDS = {
    "tensorflow": "tensorflow for CUDA (pip install 'tensorflow[and-cuda]')",
    "jax": "jax for CUDA (pip install 'jax[cuda12]')",
    "torch": "torch for CUDA (see https://pytorch.org/get-started/locally)",
}
"""For each backend: what to install so that it can use GPUs, for error messages."""


def check_available(
    devices: Iterable[Device], available: Iterable[Device], backend: str, cpus: Iterable[Device]
) -> None:
    """Raises a `DeviceError` if one of `devices` is not among the `available` devices.

    If no device is available, the message offers the `cpus` of this machine instead.
    """
    devices, available = tuple(devices), tuple(available)
    if devices and not available and devices[0].kind != "cpu":
        kind = devices[0].kind
        cure = (
            f"Look at `nvidia-smi` and CUDA_VISIBLE_DEVICES, and install {GPU_BUILDS[backend]}"
            if kind == "gpu"
            else f"Look whether {backend} is installed with {kind.upper()} support"
        )
        raise DeviceError(
            f"Expected a {kind.upper()}, but the backend {backend} sees none on this machine; its "
            f"devices are {[str(d) for d in cpus]}. Received: devices={[str(d) for d in devices]}. "
            f"{cure}; or name CPU devices: ['cpu:0', 'cpu:1']."
        )
    unknown = [str(device) for device in devices if device not in available]
    if unknown:
        raise DeviceError(
            f"Expected devices of this machine, which has {[str(d) for d in available]}. "
            f"Received: devices={unknown}. For more CPU devices call "
            "kerasdist.config.set_logical_cpu_devices(n), or set KERASDIST_CPU_DEVICES=n, before "
            "the first model or tensor is made."
        )
