"""The GPUs that this process may use, found without starting a framework.

NVIDIA's are found by NVML, which counts those that a container or a scheduler's cgroup shows, and
works under WSL2; AMD's by the files of Linux's driver. In both cases the variables count that limit
what a process sees.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

CUDA = "CUDA_VISIBLE_DEVICES"
HIP = "HIP_VISIBLE_DEVICES"
ROCR = "ROCR_VISIBLE_DEVICES"

_INDEX = re.compile(r"\d+")
_MIG = "MIG-"
# In the properties of a node of AMD's driver: kinds of memory that are a GPU's own.
_OF_GPU = (1, 2)


@final
@dataclass(frozen=True)
class Gpu:
    """A GPU of this machine.

    Attributes:
        uuid: What no other GPU has, such as ``"GPU-6d0d..."``; ``"MIG-..."`` for a part of one.
        name: Its model.
        memory: Its memory in bytes; None where the driver does not tell.
    """

    uuid: str
    name: str
    memory: int | None


def visible(environ: Mapping[str, str] | None = None, root: Path = Path("/")) -> tuple[Gpu, ...]:
    """Returns the GPUs that a process with these variables sees, none without a driver.

    They have the order in which CUDA or ROCm numbers them for the process. Only where GPUs of
    several models are in one machine, and ``CUDA_DEVICE_ORDER`` is not ``PCI_BUS_ID``, CUDA may
    count the faster ones first, which cannot be known here.

    Args:
        environ: The process's variables; None: this process's.
        root: The folder in which ``sys`` and ``dev`` are.
    """
    environ = os.environ if environ is None else environ
    nvidia = list(_nvidia())
    if nvidia:
        seen = _selected(nvidia, environ.get(CUDA))
        parts = tuple(gpu for gpu in seen if gpu.uuid.startswith(_MIG))
        return parts[:1] or seen  # a process sees one part of a divided GPU, and nothing else
    seen = _selected([(gpu,) for gpu in _amd(root)], environ.get(ROCR))
    return _selected([(gpu,) for gpu in seen], environ.get(HIP, environ.get(CUDA)))


def driver_problem() -> str | None:
    """Returns why NVIDIA's driver does not work; None where it does, and where there is none."""
    import pynvml

    nvml: Any = pynvml  # it has no types
    try:
        nvml.nvmlInit()
    except nvml.NVMLError_LibraryNotFound:
        return None
    except nvml.NVMLError as error:
        return str(error)
    nvml.nvmlShutdown()
    return None


def _selected(found: Sequence[Sequence[Gpu]], text: str | None) -> tuple[Gpu, ...]:
    """Returns the GPUs that a variable names, as CUDA reads it: up to the first unknown name.

    A divided GPU is followed by its parts, and stands for the first of them.
    """
    if text is None:
        return tuple(gpus[:2][-1] for gpus in found)
    chosen: list[Gpu] = []
    for entry in text.split(","):
        gpu = _named(found, entry.strip())
        if gpu is None:
            break
        if gpu in chosen:
            return ()  # as CUDA does where one is named twice
        chosen.append(gpu)
    return tuple(chosen)


def _named(found: Sequence[Sequence[Gpu]], entry: str) -> Gpu | None:
    index = _INDEX.match(entry)
    if index is not None:
        number = int(index[0])
        return found[number][:2][-1] if number < len(found) else None
    if not entry.startswith(("GPU-", _MIG)):
        return None
    # The first digits are enough.
    same = [(gpus, gpu) for gpus in found for gpu in gpus if gpu.uuid.startswith(entry)]
    if len(same) != 1:
        return None
    gpus, gpu = same[0]
    return gpus[:2][-1] if gpu is gpus[0] else gpu


def _nvidia() -> Iterator[tuple[Gpu, ...]]:
    """Yields each GPU that NVML shows, followed by the parts into which it is divided."""
    import pynvml

    nvml: Any = pynvml
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:  # no driver, or one that does not work
        return
    try:
        for index in range(nvml.nvmlDeviceGetCount()):
            try:
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                yield (_described(nvml, handle), *_parts(nvml, handle))
            except nvml.NVMLError:  # counted, but of another container or job
                continue
    finally:
        nvml.nvmlShutdown()


def _parts(nvml: Any, handle: Any) -> Iterator[Gpu]:
    try:
        divided = nvml.nvmlDeviceGetMigMode(handle)[0]
        count = nvml.nvmlDeviceGetMaxMigDeviceCount(handle) if divided else 0
    except nvml.NVMLError:  # a GPU that cannot be divided
        return
    for index in range(count):
        try:
            part = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
        except nvml.NVMLError:  # fewer than there may be
            continue
        yield _described(nvml, part)


def _described(nvml: Any, handle: Any) -> Gpu:
    try:
        memory = int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
    except nvml.NVMLError:  # where it is the machine's
        memory = None
    return Gpu(nvml.nvmlDeviceGetUUID(handle), nvml.nvmlDeviceGetName(handle), memory)


def _amd(root: Path) -> Iterator[Gpu]:
    """Yields the GPUs of AMD's driver whose device files are here, as in a container."""
    nodes = (root / "sys/class/kfd/kfd/topology/nodes").glob("[0-9]*")
    for node in sorted(nodes, key=lambda path: int(path.name)):
        try:
            facts = _properties(node / "properties")
            minor = facts.get("drm_render_minor", 0)
            if not facts.get("simd_count") or not (root / f"dev/dri/renderD{minor}").exists():
                continue  # a processor, or a GPU of another container
            banks = [_properties(bank) for bank in node.glob("mem_banks/*/properties")]
            name = (node / "name").read_text(encoding="utf-8").strip()
        except OSError:  # of another job
            continue
        serial = facts.get("unique_id")  # some have none
        place = f"{platform.node()}/{facts.get('domain', 0)}/{facts['location_id']:08x}"
        uuid = f"GPU-{serial:016x}" if serial else place
        memory = sum(bank["size_in_bytes"] for bank in banks if bank.get("heap_type") in _OF_GPU)
        yield Gpu(uuid, name or "AMD GPU", memory or None)


def _properties(file: Path) -> dict[str, int]:
    words = (line.split() for line in file.read_text(encoding="utf-8").splitlines())
    return {pair[0]: int(pair[1]) for pair in words if len(pair) == 2 and pair[1].isdecimal()}
