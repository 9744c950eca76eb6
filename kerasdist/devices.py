"""Names of devices: Keras's own (``cpu:0``, ``gpu:1``, ``tpu:0``), TensorFlow's accepted too."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from kerasdist.errors import DeviceError

_KINDS = {"cpu": "cpu", "gpu": "gpu", "cuda": "gpu", "tpu": "tpu"}

# From plain "gpu" to "/job:localhost/replica:0/task:0/device:GPU:1".
_NAME = re.compile(
    r"(?:/job:\w+)?(?:/replica:\d+)?(?:/task:\d+)?/?(?:device:)?(cpu|gpu|cuda|tpu)(?::(\d+))?",
    re.IGNORECASE,
)


@dataclass(frozen=True, order=True)
class Device:
    """One device of this machine.

    Attributes:
        kind: ``"cpu"``, ``"gpu"`` or ``"tpu"``.
        index: Its number among the devices of that kind.
    """

    kind: str
    index: int

    def __str__(self) -> str:
        return f"{self.kind}:{self.index}"


def parse_device(name: Any) -> Device:
    """Reads a device's name.

    Args:
        name: Keras's spelling (``"gpu:1"``), torch's (``"cuda:1"``), or one of TensorFlow's
            (``"/gpu:1"``, ``"/job:localhost/replica:0/task:0/device:GPU:1"``). A missing number is
            0.

    Returns:
        The `Device`.

    Raises:
        DeviceError: If `name` is none of these.
    """
    if isinstance(name, Device):
        return name
    match = _NAME.fullmatch(name) if isinstance(name, str) else None
    if match is None:
        raise DeviceError(
            "Expected the name of a device, such as 'cpu:0', 'gpu:1' or '/device:GPU:1'. "
            f"Received: device={name!r}. Name a device by its kind and its number."
        )
    return Device(_KINDS[match.group(1).lower()], int(match.group(2) or 0))


def parse_devices(names: Iterable[Any]) -> tuple[Device, ...]:
    """Reads a list of device names and refuses an empty one and duplicates.

    Args:
        names: Names as `parse_device` takes them.

    Returns:
        The devices, in the order given.

    Raises:
        DeviceError: If there is no device, one is named twice, or a name cannot be read.
    """
    if isinstance(names, str | Device):
        names = [names]
    devices = tuple(parse_device(name) for name in names)
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


def check_available(devices: Iterable[Device], available: Iterable[Device]) -> None:
    """Refuses a device that this machine does not have.

    Args:
        devices: The devices asked for.
        available: The devices there are.

    Raises:
        DeviceError: If one of `devices` is not in `available`.
    """
    available = tuple(available)
    unknown = [str(device) for device in devices if device not in available]
    if unknown:
        raise DeviceError(
            f"Expected devices of this machine, which has {[str(d) for d in available]}. "
            f"Received: devices={unknown}. For more CPU devices call "
            "kerasdist.config.set_logical_cpu_devices(n), or set KERASDIST_CPU_DEVICES=n, before "
            "the first model or tensor is made."
        )
