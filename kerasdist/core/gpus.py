"""Finds the GPUs that this process may use, without starting a framework.

NVIDIA's GPUs are found by NVML, which also works under WSL2. NVML shows only the GPUs that the
process's container, or the scheduler's cgroup, allows the process to use. AMD's GPUs are found in
the files of Linux's driver. Environment variables such as ``CUDA_VISIBLE_DEVICES`` may hide some of
these GPUs.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import platform
import re
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from kerasdist.errors import DeviceError

CUDA = "CUDA_VISIBLE_DEVICES"
HIP = "HIP_VISIBLE_DEVICES"
ROCR = "ROCR_VISIBLE_DEVICES"
ORDER = "CUDA_DEVICE_ORDER"

_INDEX = re.compile(r"\d+")
_MIG = "MIG-"
_NAME = re.compile(r"\d|GPU-|MIG-")
# The values of `heap_type` by which AMD's driver says that a bank of memory is on a GPU.
_OF_GPU = (1, 2)


@final
@dataclass(frozen=True)
class Gpu:
    """A GPU of this machine.

    Attributes:
        uuid: An id that no other GPU has: ``"GPU-6d0d..."``, or ``"MIG-..."`` for a MIG device.
        name: The GPU's model.
        memory: The GPU's memory in bytes; None if the driver does not report the size.
        maker: ``"NVIDIA"`` or ``"AMD"``.
    """

    uuid: str
    name: str
    memory: int | None
    maker: str = "NVIDIA"


def visible(environ: Mapping[str, str] = os.environ, root: Path = Path("/")) -> tuple[Gpu, ...]:
    """Returns the GPUs that a process with these environment variables sees.

    Returns an empty tuple if the machine has no driver for GPUs.

    The GPUs come in the order in which CUDA or ROCm numbers them for the process. The order may be
    wrong if a machine has GPUs of several models and ``CUDA_DEVICE_ORDER`` is not ``PCI_BUS_ID``,
    because CUDA may then count the faster GPUs first.

    Args:
        environ: The environment variables of the process.
        root: The folder that contains ``sys`` and ``dev``.
    """
    nvidia = list(_nvidia())
    if nvidia:
        seen = _selected(nvidia, environ.get(CUDA))
        parts = tuple(gpu for gpu in seen if gpu.uuid.startswith(_MIG))
        return parts[:1] or seen  # CUDA shows a process one MIG device, and no other GPU
    seen = _selected([(gpu,) for gpu in _amd(root)], environ.get(ROCR))
    return _selected([(gpu,) for gpu in seen], environ.get(HIP, environ.get(CUDA)))


@final
@dataclass(frozen=True)
class Usage:
    """How much of a GPU all processes together use.

    Attributes:
        used: The bytes of the GPU's memory that are in use.
        total: The size of the GPU's memory in bytes.
        busy: The GPU's utilization, from 0 to 1; None if the driver reports none, as for a MIG
            device.
    """

    used: int
    total: int
    busy: float | None


@final
class Watch:
    """Asks NVML how much memory of some GPUs is in use, and how busy these GPUs are.

    NVML is opened once, and stays open between calls of `usage`.

    Args:
        seen: The GPUs to ask about; GPUs of other makers than NVIDIA are left out.
    """

    def __init__(self, seen: Sequence[Gpu]) -> None:
        self._handles: list[Any] = []
        nvml = _library()
        # If NVML raises an error, as for a GPU that has fallen off the bus, no GPU is watched.
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlInit()
            uuids = [gpu.uuid for gpu in seen if gpu.maker == "NVIDIA"]
            self._handles = list(map(nvml.nvmlDeviceGetHandleByUUID, uuids))

    def usage(self) -> list[Usage]:
        """Returns the usage of each GPU that reports its memory."""
        found: list[Usage] = []
        for handle in self._handles:
            memory = ask("nvmlDeviceGetMemoryInfo", handle)
            rates = ask("nvmlDeviceGetUtilizationRates", handle)
            busy = None if rates is None else rates.gpu / 100
            if memory is not None:
                found.append(Usage(int(memory.used), int(memory.total), busy))
        return found


def are_named(environ: Mapping[str, str]) -> bool:
    """Returns whether a variable such as CUDA_VISIBLE_DEVICES names a GPU.

    The GPU need not exist.
    """
    return any(_NAME.match(environ.get(variable, "").strip()) for variable in (CUDA, HIP, ROCR))


@contextlib.contextmanager
def opened_nvml() -> Generator[Any]:
    """Opens NVML and yields its module, or None if there is no driver that works."""
    nvml = _library()
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        yield None
        return
    try:
        yield nvml
    finally:
        nvml.nvmlShutdown()


def handles(nvml: Any) -> Iterator[tuple[int, Any]]:
    """Yields the number and the handle of each GPU that the container or job may use."""
    for index in range(nvml.nvmlDeviceGetCount()):
        handle = ask("nvmlDeviceGetHandleByIndex", index)
        if handle is not None:
            yield index, handle


def ask(name: str, *arguments: object) -> Any:
    """Returns the result of a function of NVML, None if NVML raises an error. NVML must be open."""
    nvml = _library()
    try:
        return getattr(nvml, name)(*arguments)
    except nvml.NVMLError:
        return None


def driver_problem() -> str | None:
    """Returns why NVIDIA's driver does not work; None if it works, or if there is no driver."""
    nvml = _library()
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return None if isinstance(error, nvml.NVMLError_LibraryNotFound) else str(error)
    nvml.nvmlShutdown()
    return None


def part(count: int, workers: int, number: int) -> range:
    """Returns the numbers of one worker's GPUs, if several workers divide GPUs equally.

    Args:
        count: How many GPUs the workers divide.
        workers: How many workers divide them.
        number: The worker's number among these workers.
    """
    size = count // workers
    return range(number * size, (number + 1) * size)


def own_share(seen: Sequence[tuple[str, Sequence[str]]], rank: int) -> list[str]:
    """Returns the UUIDs of a worker's own GPUs, given the GPUs that every worker sees.

    Workers that see the same GPUs divide these GPUs in the order of the workers' ranks. If a
    scheduler or a launcher has given each worker GPUs of its own, the worker takes all GPUs that it
    sees.

    Args:
        seen: For each worker, its machine and the UUIDs of the GPUs that the worker sees.
        rank: The worker's number.

    Raises:
        DeviceError: If there are fewer GPUs than workers, or if two workers have some GPUs in
            common, but do not see exactly the same GPUs.
    """
    mine = seen[rank][1]
    if not mine:
        return []
    sharing = [each for each, (_, theirs) in enumerate(seen) if set(theirs) & set(mine)]
    for each in sharing:
        if set(seen[each][1]) != set(mine):
            raise DeviceError(
                "Expected the workers of one machine to see the same GPUs, which they divide, or "
                f"separate ones. Received: worker {rank} sees {list(mine)} and worker {each} "
                f"{list(seen[each][1])}, on {seen[rank][0]}. Set {CUDA} for all of them, or for "
                "none."
            )
    own = part(len(mine), len(sharing), sharing.index(rank))
    if not own:
        raise DeviceError(
            f"Expected a GPU for each of the {len(sharing)} workers of {seen[rank][0]}. Received: "
            f"gpus={list(mine)}, for workers {sharing}. Start fewer workers; or set "
            f"KERASDIST_CPU_DEVICES=1 to compute on CPUs; or name the devices of each: "
            "MultiWorkerMirroredStrategy(devices=[...])."
        )
    return [seen[sharing[0]][1][index] for index in own]


def divide(environ: Mapping[str, str], workers: int) -> list[dict[str, str]]:
    """Returns, for each worker of this machine, environment variables that leave it its own GPUs.

    These variables hide the other workers' GPUs, even before the worker's script makes a strategy.
    If there are fewer GPUs than workers, no variables are returned for any worker, and the strategy
    raises an error later.

    Args:
        environ: The environment variables that the workers have before the returned ones are set.
        workers: How many workers this machine has.
    """
    if workers < 2:
        return [{} for _ in range(workers)]
    variable, names = offered(environ)
    given = {} if environ.get(variable) else {ORDER: environ.get(ORDER, "PCI_BUS_ID")}
    parts = [part(len(names), workers, number) for number in range(workers)]
    return [
        {**given, variable: ",".join(names[index] for index in own)} if own else {} for own in parts
    ]


def offered(environ: Mapping[str, str]) -> tuple[str, list[str]]:
    """Returns the environment variable that selects GPUs, and the names of the GPUs in its value.

    If the variable is not set, the names are the numbers of all GPUs of this machine.
    """
    seen = visible(environ)
    is_hip = bool(seen) and seen[0].maker == "AMD" and not environ.get(CUDA)
    variable = HIP if is_hip else CUDA
    chosen = environ.get(variable)
    if chosen is None:
        return variable, [str(index) for index in range(len(seen))]
    return variable, [name for name in chosen.split(",") if name]


def _library() -> Any:
    return importlib.import_module("pynvml")  # not by `import`: pynvml has no types


def _selected(found: Sequence[Sequence[Gpu]], text: str | None) -> tuple[Gpu, ...]:
    """Returns the GPUs that `text`, such as the value of ``CUDA_VISIBLE_DEVICES``, selects.

    `found` has a sequence for each GPU: the GPU and then its MIG devices. As in CUDA, the first
    unknown name ends the list, and the name of a GPU with MIG devices stands for the first of these
    devices.
    """
    if text is None:
        return tuple(gpus[:2][-1] for gpus in found)
    chosen: list[Gpu] = []
    for entry in text.split(","):
        gpu = _named(found, entry.strip())
        if gpu is None:
            break
        if gpu in chosen:
            return ()  # CUDA too shows no GPU if one GPU is named twice
        chosen.append(gpu)
    return tuple(chosen)


def _named(found: Sequence[Sequence[Gpu]], entry: str) -> Gpu | None:
    index = _INDEX.match(entry)
    if index is not None:
        number = int(index[0])
        return found[number][:2][-1] if number < len(found) else None
    if not entry.startswith(("GPU-", _MIG)):
        return None
    # A UUID may be shortened to its first digits, if no other GPU's UUID begins with them.
    same = [(gpus, gpu) for gpus in found for gpu in gpus if gpu.uuid.startswith(entry)]
    if len(same) != 1:
        return None
    gpus, gpu = same[0]
    return gpus[:2][-1] if gpu is gpus[0] else gpu


def _nvidia() -> Iterator[tuple[Gpu, ...]]:
    """Yields each GPU that NVML shows, followed by its MIG devices."""
    with opened_nvml() as nvml:
        if nvml is None:
            return
        for _, handle in handles(nvml):
            with contextlib.suppress(nvml.NVMLError):
                yield (_described(handle), *_parts(handle))


def _parts(handle: object) -> Iterator[Gpu]:
    mode = ask("nvmlDeviceGetMigMode", handle)  # None if the GPU does not support MIG
    count = ask("nvmlDeviceGetMaxMigDeviceCount", handle) if mode and mode[0] else None
    for index in range(count or 0):
        part = ask("nvmlDeviceGetMigDeviceHandleByIndex", handle, index)
        if part is not None:  # the GPU may have fewer MIG devices than its maximum
            yield _described(part)


def _described(handle: object) -> Gpu:
    nvml = _library()
    # NVML reports no size of memory for a GPU that shares the host's memory.
    memory = ask("nvmlDeviceGetMemoryInfo", handle)
    size = None if memory is None else int(memory.total)
    return Gpu(nvml.nvmlDeviceGetUUID(handle), nvml.nvmlDeviceGetName(handle), size)


def _amd(root: Path) -> Iterator[Gpu]:
    """Yields each GPU that AMD's driver lists, if this process sees the GPU's device file."""
    nodes = (root / "sys/class/kfd/kfd/topology/nodes").glob("[0-9]*")
    for node in sorted(nodes, key=lambda path: int(path.name)):
        try:
            facts = _properties(node / "properties")
            minor = facts.get("drm_render_minor", 0)
            if not facts.get("simd_count") or not (root / f"dev/dri/renderD{minor}").exists():
                continue  # the node is a CPU, or a GPU of another container
            banks = [_properties(bank) for bank in node.glob("mem_banks/*/properties")]
            name = (node / "name").read_text(encoding="utf-8").strip()
        except OSError:  # a GPU of another job, whose files this process may not read
            continue
        serial = facts.get("unique_id")  # some GPUs have no id
        place = f"{platform.node()}/{facts.get('domain', 0)}/{facts['location_id']:08x}"
        uuid = f"GPU-{serial:016x}" if serial else place
        memory = sum(bank["size_in_bytes"] for bank in banks if bank.get("heap_type") in _OF_GPU)
        yield Gpu(uuid, name or "AMD GPU", memory or None, "AMD")


def _properties(file: Path) -> dict[str, int]:
    words = (line.split() for line in file.read_text(encoding="utf-8").splitlines())
    return {pair[0]: int(pair[1]) for pair in words if len(pair) == 2 and pair[1].isdecimal()}
