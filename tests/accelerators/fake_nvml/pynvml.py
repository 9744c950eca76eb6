"""In place of NVML: the GPUs that the variable FAKE_NVML describes.

Tests put this folder first on the path. FAKE_NVML is a number of GPUs, a JSON list of them (see
`FakeGpu`), or ``broken`` for a driver that does not work; without it there is no driver.
"""

import json
import os
from dataclasses import dataclass, field
from types import SimpleNamespace


class NVMLError(Exception):
    pass


class NVMLError_LibraryNotFound(NVMLError):
    pass


@dataclass
class FakeGpu:
    uuid: str
    name: str = "NVIDIA H100 80GB HBM3"
    memory: int | None = 80 << 30
    hidden: bool = False
    parts: list = field(default_factory=list)
    used: int = 0
    nvlinks: int = 0
    pcie_width: int = 16


def _gpus():
    given = os.environ.get("FAKE_NVML")
    if given is None:
        raise NVMLError_LibraryNotFound("NVML Shared Library Not Found")
    if given == "broken":
        raise NVMLError("Driver/library version mismatch")
    if given.isdecimal():
        return [FakeGpu(f"GPU-{index:08x}") for index in range(int(given))]
    return [FakeGpu(**gpu) for gpu in json.loads(given)]


def nvmlInit():
    _gpus()


def nvmlShutdown():
    pass


def nvmlDeviceGetCount():
    return len(_gpus())


def nvmlDeviceGetHandleByIndex(index):
    gpu = _gpus()[index]
    if gpu.hidden:
        raise NVMLError("Insufficient Permissions")
    return gpu


def nvmlDeviceGetUUID(gpu):
    return gpu.uuid


def nvmlDeviceGetName(gpu):
    return gpu.name


def nvmlDeviceGetMemoryInfo(gpu):
    if gpu.memory is None:
        raise NVMLError("Not Supported")
    return SimpleNamespace(total=gpu.memory, used=gpu.used)


def nvmlSystemGetDriverVersion():
    return "550.1"


def nvmlSystemGetCudaDriverVersion_v2():
    return 12040


def nvmlDeviceGetNvLinkState(gpu, link):
    if link >= 18:
        raise NVMLError("Invalid Argument")
    return int(link < gpu.nvlinks)


def nvmlDeviceGetMaxPcieLinkGeneration(gpu):
    return 4


def nvmlDeviceGetCurrPcieLinkWidth(gpu):
    return gpu.pcie_width


def nvmlDeviceGetMaxPcieLinkWidth(gpu):
    return 16


def nvmlDeviceGetMigMode(gpu):
    if gpu.name.startswith("GeForce"):
        raise NVMLError("Not Supported")
    return [bool(gpu.parts), bool(gpu.parts)]


def nvmlDeviceGetMaxMigDeviceCount(gpu):
    return 7


def nvmlDeviceGetMigDeviceHandleByIndex(gpu, index):
    if index >= len(gpu.parts):
        raise NVMLError("Not Found")
    return FakeGpu(gpu.parts[index], f"{gpu.name} MIG 1g.10gb", 10 << 30)


def nvmlDeviceGetHandleByUUID(uuid):
    for gpu in _gpus():
        if gpu.uuid == uuid and not gpu.hidden:
            return gpu
        if uuid in gpu.parts:
            return nvmlDeviceGetMigDeviceHandleByIndex(gpu, gpu.parts.index(uuid))
    raise NVMLError("Not Found")


def nvmlDeviceGetUtilizationRates(gpu):
    if "MIG" in gpu.name:
        raise NVMLError("Not Supported")
    return SimpleNamespace(gpu=75)
