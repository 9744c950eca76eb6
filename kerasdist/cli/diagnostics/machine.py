"""The checks of ``kerasdist doctor`` on one machine."""

from __future__ import annotations

import importlib
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from kerasdist.cli.diagnostics.findings import Finding, as_dicts, judge, of_dicts
from kerasdist.cli.diagnostics.jobs import has_accelerator
from kerasdist.cli.launch import supervisor
from kerasdist.cluster import addresses, detection
from kerasdist.core import __version__, gpus
from kerasdist.core.backend_choice import (
    KNOWN,
    TESTED,
    VARIABLE,
    backend_choice,
    distributions,
    floors,
    folder_of,
    framework_version,
    install_command,
    too_old,
    version_of,
)
from kerasdist.core.internals import Internal, internals_of
from kerasdist.core.sharding import size
from kerasdist.errors import KerasdistError
from kerasdist.job.listening import is_loopback

_SHM = Path("/dev/shm")
_LEAST_SHM = 1 << 30
_LEAST_DISK, _FULL_DISK = 10e9, 1e9
_LEAST_FILES = 4096
_NCCL = ("nvidia-nccl-cu12", "nvidia-nccl-cu13")
_BUSY = 0.1
_SECONDS_TO_IMPORT = 45.0  # less than the 60 s in which a host must answer `doctor --hosts`
# Bytes of data per second over one PCIe lane in one direction, by PCIe generation.
_PCIE_LANE = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
_MAX_NVLINKS = 18


def look() -> list[Finding]:
    """Returns the findings of all checks on this machine."""
    checks: tuple[Callable[[], Iterator[Finding]], ...] = (
        *(_versions, _nightly, _backend, _internals, look_at_gpus, _processor, _cluster, _ports),
        *(_name, _disks, _shared_memory, _files, _locked_memory),
    )
    return [finding for check in checks for finding in check()]


def _versions() -> Iterator[Finding]:
    """Checks whether Keras and the frameworks have the versions that kerasdist needs."""
    here = {name: version for name in ("keras", *KNOWN) if (version := framework_version(name))}
    old = {name: problem for name in here if (problem := too_old(name)) is not None}
    for name, problem in old.items():
        found = f"{name} {here[name]}, where kerasdist needs >={floors()[name]}"
        yield Finding("versions", "problem", found, f"Making a strategy is refused. {problem}")
    python = ".".join(map(str, sys.version_info[:3]))
    shown = [f"Python {python}", f"kerasdist {__version__}"]
    shown += [f"{name} {version}" for name, version in here.items() if name not in old]
    said = "Supported. All workers need the same versions."
    yield Finding("versions", "ok", ", ".join(shown), said)


def _nightly() -> Iterator[Finding]:
    """Checks whether Keras is installed twice, as a release and as a nightly build."""
    both = distributions("keras")
    if len(both) < 2:
        return
    names = " and ".join(f"{name} {one.version}" for name, one in both.items())
    command = f"{install_command('keras')}, or keras-nightly in its place"
    folders = [folder_of(one) for one in both.values()]
    if folders[0] != folders[1]:
        said = f"Uninstall one of them unless you want both: {command}."
        found = f"{names}; the one in {folders[0]} is imported"
        yield Finding("Keras", "warning", found, said)
        return
    said = (
        "One package has overwritten files of the other, so parts of Keras do not fit together. "
        f"Uninstall both, and install one: {command}."
    )
    yield Finding("Keras", "problem", f"{names}, in one folder", said)


def _internals() -> Iterator[Finding]:
    """Checks whether Keras and the backend have the private functions that kerasdist needs."""
    backend = backend_choice()
    if backend.problem is not None:
        return
    code = "from kerasdist.cli.diagnostics import machine; machine.tell_internals()"
    try:
        asked = subprocess.run(
            [sys.executable, "-P", "-c", code],
            env={**os.environ, VARIABLE: backend.name},
            capture_output=True,
            text=True,
            timeout=_SECONDS_TO_IMPORT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        found = f"Keras was not imported within {_SECONDS_TO_IMPORT:g} s"
        yield Finding("internals", "warning", found, "Each worker needs at least as long to start.")
        return
    if asked.returncode:
        found = (asked.stderr.strip() or f"exit code {asked.returncode}").splitlines()[-1]
        said = f"No strategy can be made on {backend.name}, because an import fails."
        yield Finding("internals", "problem", found, said)
        return
    yield from of_dicts(json.loads(asked.stdout.splitlines()[-1]), "")


def tell_internals() -> None:
    """Prints, as JSON, findings about private functions that Keras or the backend lacks."""
    backend = backend_choice().name
    tables = ("kerasdist.keras_compat.internals", f"kerasdist.backends.{backend}.internals")
    used = [
        one
        for table in map(importlib.import_module, tables)
        for one in internals_of(table).values()
        if not one.backends or backend in one.backends
    ]
    print(json.dumps(as_dicts(of_internals(backend, used))))  # noqa: T201


def of_internals(backend: str, used: Sequence[Internal]) -> Iterator[Finding]:
    """Yields a finding for each missing private function, or one finding if none is missing."""
    gone = [one for one in used if one.is_gone()]
    for one in gone:
        found = f"{one.package} {framework_version(one.package)} has no {next(iter(one.spellings))}"
        tested = install_command(one.package, f"=={TESTED[one.package][-1]}")
        said = (
            f"Needed for {one.feature}. Without it: {one.without}. Install a newer kerasdist, or a "
            f"version that was tested: {tested}."
        )
        yield Finding("internals", "problem" if one.in_each_fit else "warning", found, said)
    if not gone:
        versions = [f"{name} {framework_version(name)}" for name in ("keras", backend)]
        found = f"all {len(used)} that kerasdist uses exist in {' and '.join(versions)}"
        yield Finding("internals", "ok", found, f"Every feature works on {backend}.")


def _backend() -> Iterator[Finding]:
    choice = backend_choice()
    found, problem = f"{choice.name} ({choice.reason})", choice.problem or ""
    if not problem and _is_built_for_cpus(choice.name) and gpus.visible():
        found += f", built for CPUs alone, beside {len(gpus.visible())} GPUs"
        problem = (
            f"A job would compute on the CPU. Install {choice.name} with CUDA, as its guide says."
        )
    ok = "Workers compute on this backend, unless the script sets another."
    yield judge("backend", found, ok, problem=problem)


def _is_built_for_cpus(backend: str) -> bool:
    """Returns whether TensorFlow or PyTorch was built for CPUs alone.

    The result is False for JAX, which has only one build: plugins add the support for GPUs.
    """
    if backend == "torch":
        return (version_of("torch") or "").endswith("+cpu")
    has_both = version_of("tensorflow-cpu") and version_of("tensorflow")
    return backend == "tensorflow" and not has_both and version_of("tensorflow-cpu") is not None


def _processor() -> Iterator[Finding]:
    cores, total = supervisor.cores(), os.cpu_count() or 1
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    load = os.getloadavg()[0]
    said = f"Other processes compute here (load {load:.1f}): workers will be slow."
    yield judge(
        "processor",
        f"{cores} of {total} cores, {size(memory)} of memory",
        "The workers of this machine share the cores in equal parts.",
        warning=said if load > total else "",
    )


def _cluster() -> Iterator[Finding]:
    """Checks whether environment variables describe a cluster without contradictions."""
    found, problem = "no cluster in the variables", ""
    ok = "A script started here is a job of its own."
    try:
        resolver = detection.detect()
        if resolver is not None:
            place = resolver.membership()
            found = f"worker {place.rank} of {place.num_workers}, told by {place.source}"
            ok = "A script started here waits for the other workers."
    except KerasdistError as error:
        found, problem = str(error), "A strategy would refuse to start. See kerasdist info."
    yield judge("environment", found, ok, problem=problem)


def _ports() -> Iterator[Finding]:
    """Checks whether a process can listen on ports, and connect to itself at 127.0.0.1."""
    problem = ""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname()[:2], timeout=5).close()
        with socket.create_server(("", addresses.of_job(os.getpid()))) as server:
            found = f"can listen on port {server.getsockname()[1]}, loopback works"
    except OSError as error:
        found = str(error)
        problem = "Workers cannot connect to each other. Look for a sandbox, or a firewall on lo."
    ok = "Workers here can connect. A job uses ports from 20000, and ports that Linux chooses."
    yield judge("ports", found, ok, problem=problem)


def _name() -> Iterator[Finding]:
    """Checks whether the machine's own name has an address that other machines can reach."""
    name, said = socket.gethostname(), ""
    try:
        known = resolved(name)
        found = f"{name} is {', '.join(known)}"
        if all(map(is_loopback, known)):
            said = (
                "Frameworks may tell other machines a loopback address. In /etc/hosts, give the "
                "name the address of the network card."
            )
    except OSError as error:
        found = f"{name}: {error}"
        said = "Workers on other machines look for rank 0 by its name. Add it to /etc/hosts or DNS."
    yield judge("own name", found, "Other machines can use this name.", warning=said)


def resolved(name: str) -> list[str]:
    """Returns the addresses of a host name.

    Raises:
        OSError: If the name has no address.
    """
    found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[4][0]) for address in found))


def _disks() -> Iterator[Finding]:
    for check, folder in (("disk", Path.cwd()), ("temporary disk", Path(tempfile.gettempdir()))):
        free = shutil.disk_usage(folder).free
        full = "Checkpoints and logs cannot be written. Make room." if free < _FULL_DISK else ""
        few = "A few checkpoints of a large model fill this disk." if free < _LEAST_DISK else ""
        found, ok = f"{size(free)} free in {folder}", "Checkpoints and logs have room."
        yield judge(check, found, ok, warning=few, problem=full)


def _shared_memory() -> Iterator[Finding]:
    if not _SHM.is_dir():
        return
    free = shutil.disk_usage(_SHM).free
    said = (
        "If /dev/shm is full, NCCL, and PyTorch's data loaders with worker processes, end with a "
        "bus error. Start a container with --shm-size=8g or --ipc=host; give a pod an emptyDir of "
        "medium Memory on /dev/shm."
    )
    ok = "NCCL and data loaders have room."
    warning = said if free < _LEAST_SHM else ""
    yield judge("shared memory", f"{size(free)} free in {_SHM}", ok, warning=warning)


def _files() -> Iterator[Finding]:
    """Checks the limit of open files, which connections and data loaders may reach."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_free = soft == resource.RLIM_INFINITY
    can = "" if hard == resource.RLIM_INFINITY else f" (at most {hard})"
    said = (
        "Workers with many connections, files of data or data loaders fail with 'Too many open "
        f"files'. Before the job: ulimit -n 65536{can}."
    )
    ok = "Enough for connections and data loaders."
    warning = "" if is_free or soft >= _LEAST_FILES else said
    found = "no limit" if is_free else f"{soft} open files"
    yield judge("open files", found, ok, warning=warning)


def _locked_memory() -> Iterator[Finding]:
    """Checks the limit of locked memory, which InfiniBand needs."""
    names = ", ".join(sorted(card.name for card in Path("/sys/class/infiniband").glob("*")))
    if not names:
        return
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        limit, said = "without limit", ""
    else:
        limit = f"up to {size(soft)}"
        said = "NCCL cannot use the card: allow memlock unlimited (ulimit -l, --ulimit memlock=-1)."
    found, ok = f"{names}, locked memory {limit}", "NCCL can use the card without copies."
    yield judge("InfiniBand", found, ok, warning=said)


def look_at_gpus() -> Iterator[Finding]:
    """Yields findings about accelerators: driver, CUDA, NCCL, memory, links."""
    broken, seen = gpus.driver_problem(), gpus.visible()
    if broken is not None:
        said = "No GPU can be used. Reinstall NVIDIA's driver, or start the machine again."
        yield Finding("GPU driver", "problem", broken, said)
        return
    if not seen:
        found, said = "no GPU", "A job computes on the CPU. If there is a GPU, look for its driver."
        if has_accelerator():
            found, said = "TPUs", "JAX uses all TPUs of a machine in one process."
        yield Finding("devices", "ok", found, said)
        return
    kinds = sorted({gpu.name for gpu in seen})
    said = "All GPUs wait for the slowest kind. Choose one kind by CUDA_VISIBLE_DEVICES."
    found, warning = f"{len(seen)} x {kinds[0]}", ""
    if len(kinds) > 1:
        found, warning = ", ".join(kinds), said
    yield judge("devices", found, "One replica runs on each.", warning=warning)
    if seen[0].maker == "NVIDIA":
        with gpus.opened_nvml() as nvml:
            yield _driver(nvml)
            yield _memory(nvml)
        yield from of_links(gpu_links())


def _driver(nvml: Any) -> Finding:
    driver = nvml.nvmlSystemGetDriverVersion()
    cuda = nvml.nvmlSystemGetCudaDriverVersion_v2()
    nccl = next((f"NCCL {version}" for name in _NCCL if (version := version_of(name))), None)
    found = f"driver {driver}, for CUDA up to {cuda // 1000}.{cuda % 1000 // 10}"
    said = "The framework's CUDA must not be newer."
    return Finding("GPU driver", "ok", f"{found}, {nccl or 'NCCL of the framework'}", said)


def _memory(nvml: object) -> Finding:
    busy: list[str] = []
    for index, handle in gpus.handles(nvml):
        # `memory` is None for a GPU that has no memory of its own, but shares the machine's memory.
        memory = gpus.ask("nvmlDeviceGetMemoryInfo", handle)
        if memory is not None and memory.used > _BUSY * memory.total:
            busy.append(f"GPU {index}: {size(memory.used)} of {size(memory.total)} are used")
    said = (
        "Another process uses this memory, so a job may run out of it, and may be slow. End that "
        "process (nvidia-smi shows it), or leave the GPU out by CUDA_VISIBLE_DEVICES."
    )
    found, ok = "; ".join(busy) or "free on all GPUs", "No other process uses the GPUs."
    return judge("GPU memory", found, ok, warning=said if busy else "")


@final
@dataclass(frozen=True)
class GpuLinks:
    """How an NVIDIA GPU is connected to the machine and to other GPUs.

    Attributes:
        name: The maker's name for the GPU.
        nvlinks: How many of its NVLinks are active.
        pcie_generation: The newest PCIe generation that both the slot and the GPU support; None if
            it is not known.
        pcie_width: How many PCIe lanes are in use.
        pcie_max_width: How many PCIe lanes the GPU has.
    """

    name: str
    nvlinks: int
    pcie_generation: int | None
    pcie_width: int | None
    pcie_max_width: int | None

    @property
    def pcie_rate(self) -> float | None:
        """Bytes a second over PCIe in one direction."""
        if self.pcie_generation not in _PCIE_LANE or self.pcie_width is None:
            return None
        return _PCIE_LANE[self.pcie_generation] * self.pcie_width


def gpu_links() -> tuple[GpuLinks, ...]:
    """Returns how this machine's NVIDIA GPUs are connected; an empty tuple without a driver."""
    with gpus.opened_nvml() as nvml:
        return () if nvml is None else tuple(_links_of(nvml, one) for _, one in gpus.handles(nvml))


def _links_of(nvml: Any, handle: Any) -> GpuLinks:
    links = [gpus.ask("nvmlDeviceGetNvLinkState", handle, link) for link in range(_MAX_NVLINKS)]
    return GpuLinks(
        name=nvml.nvmlDeviceGetName(handle),
        nvlinks=links.count(1),
        pcie_generation=gpus.ask("nvmlDeviceGetMaxPcieLinkGeneration", handle),
        pcie_width=gpus.ask("nvmlDeviceGetCurrPcieLinkWidth", handle),
        pcie_max_width=gpus.ask("nvmlDeviceGetMaxPcieLinkWidth", handle),
    )


def of_links(found: Sequence[GpuLinks]) -> Iterator[Finding]:
    """Yields findings about the links between GPUs."""
    narrow = [
        f"GPU {index}: x{gpu.pcie_width} of x{gpu.pcie_max_width}"
        for index, gpu in enumerate(found)
        if gpu.pcie_width and gpu.pcie_max_width and gpu.pcie_width < gpu.pcie_max_width
    ]
    if narrow:
        said = "Input is slow, and so are gradients without NVLink. Check the slot and the riser."
        yield Finding("PCIe", "warning", "; ".join(narrow), said)
    numbers = {gpu.nvlinks for gpu in found}
    if len(found) < 2:
        return
    if numbers == {0}:
        rate = found[0].pcie_rate
        shown = "" if rate is None else f", {size(rate)}/s a direction"
        said = "Gradients travel by PCIe: large models scale worse than with NVLink."
        yield Finding("links", "ok", f"PCIe without NVLink{shown}", said)
    elif len(numbers) > 1:
        shown = ", ".join(f"GPU {index}: {gpu.nvlinks}" for index, gpu in enumerate(found))
        said = "All wait for the GPU with fewest links. One may be broken: nvidia-smi nvlink -s"
        yield Finding("links", "warning", f"NVLinks that are active: {shown}", said)
    else:
        said = "Gradients travel by NVLink."
        yield Finding("links", "ok", f"{found[0].nvlinks} NVLinks on each GPU", said)
