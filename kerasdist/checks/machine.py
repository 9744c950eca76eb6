"""What ``kerasdist doctor`` looks at on one machine."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from kerasdist.checks import gpu_state
from kerasdist.checks.findings import Finding, Verdict
from kerasdist.cluster import detection, ports
from kerasdist.core import gpus
from kerasdist.core.backend_choice import KNOWN, backend_choice
from kerasdist.errors import KerasdistError
from kerasdist.launch import supervisor
from kerasdist.plan.report import size

_SHM = Path("/dev/shm")
_LEAST_SHM = 1 << 30
_LEAST_DISK, _FULL_DISK = 10e9, 1e9
_LEAST_FILES = 4096
_CPU_PACKAGES = {"tensorflow": "tensorflow-cpu"}


def look() -> list[Finding]:
    """Returns findings about this machine."""
    checks: tuple[Callable[[], Iterator[Finding]], ...] = (
        _versions,
        _backend,
        gpu_state.look,
        _processor,
        _cluster,
        _ports,
        _name,
        _disks,
        _shared_memory,
        _files,
        _locked_memory,
    )
    return [finding for check in checks for finding in check()]


def _versions() -> Iterator[Finding]:
    """The versions of Keras and the frameworks, against those that kerasdist needs."""
    required = [Requirement(text) for text in metadata.requires("kerasdist") or ()]
    needed = {
        one.name: one for one in required if one.name in (*KNOWN, "keras") and len(one.specifier)
    }
    python = ".".join(map(str, sys.version_info[:3]))
    found, old = [f"Python {python}", f"kerasdist {metadata.version('kerasdist')}"], []
    for name, requirement in needed.items():
        version = _version(name) or _version(_CPU_PACKAGES.get(name, name))
        if version is None:
            continue
        found.append(f"{name} {version}")
        if not requirement.specifier.contains(version, prereleases=True):
            old.append(f"{name} {version}, where kerasdist needs {requirement.specifier}")
    if old:
        yield Finding("versions", "problem", "; ".join(old), "Jobs may fail. Update them by pip.")
    else:
        said = "Supported. All workers need the same versions."
        yield Finding("versions", "ok", ", ".join(found), said)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _backend() -> Iterator[Finding]:
    choice = backend_choice()
    found = f"{choice.name} ({choice.reason})"
    if choice.problem is not None:
        yield Finding("backend", "problem", found, choice.problem)
        return
    built = gpu_state.is_built_for_gpus(choice.name)
    if built is False and gpus.visible():
        yield Finding(
            "backend",
            "problem",
            f"{found}, built for CPUs alone, beside {len(gpus.visible())} GPUs",
            f"A job would compute on the CPU. Install {choice.name} with CUDA: see its own guide.",
        )
        return
    yield Finding("backend", "ok", found, "What workers compute with, unless a script says more.")


def _processor() -> Iterator[Finding]:
    cores, total = supervisor.cores(), os.cpu_count() or 1
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    found = f"{cores} of {total} cores, {size(memory)} of memory"
    load = os.getloadavg()[0]
    if load > total:
        said = (
            f"Others compute here (load {load:.1f}): workers will be slow, and wait for the "
            "slowest."
        )
        yield Finding("processor", "warning", found, said)
    else:
        said = "The workers of this machine share the cores in equal parts."
        yield Finding("processor", "ok", found, said)


def _cluster() -> Iterator[Finding]:
    """What the environment says of a cluster."""
    try:
        resolver = detection.detect()
    except KerasdistError as error:
        said = "A strategy would refuse to start. See kerasdist info."
        yield Finding("environment", "problem", str(error), said)
        return
    if resolver is None:
        said = "A script started here is a job of its own."
        yield Finding("environment", "ok", "no cluster in the variables", said)
    else:
        place = resolver.membership()
        found = f"worker {place.rank} of {place.num_workers}, told by {place.source}"
        yield Finding("environment", "ok", found, "A script started here waits for the others.")


def _ports() -> Iterator[Finding]:
    """Whether a process can listen, and reach itself by the loopback address."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname()[:2], timeout=5).close()
        with socket.create_server(("", ports.of_job(os.getpid()))) as server:
            number = server.getsockname()[1]
    except OSError as error:
        said = "Workers could not find each other. Look for a sandbox, or a firewall on lo."
        yield Finding("ports", "problem", f"{error}", said)
        return
    said = "Workers of this machine can meet. A job uses ports from 20000, and what Linux gives."
    yield Finding("ports", "ok", f"can listen on port {number}, loopback works", said)


def _name() -> Iterator[Finding]:
    """Whether the machine's own name leads to an address that others reach."""
    name = socket.gethostname()
    try:
        addresses = resolved(name)
    except OSError as error:
        said = "Rank 0 of a job of several machines tells its name. Add it to /etc/hosts or DNS."
        yield Finding("own name", "warning", f"{name}: {error}", said)
        return
    found = f"{name} is {', '.join(addresses)}"
    if all(is_loopback(address) for address in addresses):
        said = (
            "Frameworks may tell other machines a loopback address. In /etc/hosts, give the name "
            "the address of the network card."
        )
        yield Finding("own name", "warning", found, said)
    else:
        yield Finding("own name", "ok", found, "Other machines can be told it.")


def resolved(name: str) -> list[str]:
    """Returns the addresses of a name.

    Raises:
        OSError: If it has none.
    """
    found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[4][0]) for address in found))


def is_loopback(address: str) -> bool:
    """Returns whether an address leads to the machine that uses it."""
    return address.startswith("127.") or address == "::1"


def _disks() -> Iterator[Finding]:
    for check, folder in (("disk", Path.cwd()), ("temporary disk", Path(tempfile.gettempdir()))):
        free = shutil.disk_usage(folder).free
        found = f"{size(free)} free in {folder}"
        yield Finding(check, *_of_disk(free, found))


def _of_disk(free: float, found: str) -> tuple[Verdict, str, str]:
    if free < _FULL_DISK:
        return "problem", found, "Checkpoints and logs cannot be written. Make room."
    if free < _LEAST_DISK:
        return "warning", found, "A few checkpoints of a large model fill it."
    return "ok", found, "Checkpoints and logs have room."


def _shared_memory() -> Iterator[Finding]:
    if not _SHM.is_dir():
        return
    yield of_shared_memory(shutil.disk_usage(_SHM).free)


def of_shared_memory(free: float) -> Finding:
    """Returns the finding about the free shared memory, in bytes."""
    found = f"{size(free)} free in {_SHM}"
    if free < _LEAST_SHM:
        said = (
            "NCCL, and PyTorch's data loaders with worker processes, die of a bus error where it "
            "is full. Start a container with --shm-size=8g or --ipc=host; a pod with an emptyDir "
            "of medium Memory on /dev/shm."
        )
        return Finding("shared memory", "warning", found, said)
    return Finding("shared memory", "ok", found, "NCCL and data loaders have room.")


def _files() -> Iterator[Finding]:
    yield of_files(*resource.getrlimit(resource.RLIMIT_NOFILE))


def of_files(soft: int, hard: int) -> Finding:
    """Returns the finding about the limit of open files."""
    if soft == resource.RLIM_INFINITY or soft >= _LEAST_FILES:
        shown = "no limit" if soft == resource.RLIM_INFINITY else f"{soft} open files"
        return Finding("open files", "ok", shown, "Enough for connections and data loaders.")
    can = "" if hard == resource.RLIM_INFINITY else f" (at most {hard})"
    said = (
        "Workers with many connections, files of data or data loaders fail with 'Too many open "
        f"files'. Before the job: ulimit -n 65536{can}."
    )
    return Finding("open files", "warning", f"{soft} open files", said)


def _locked_memory() -> Iterator[Finding]:
    """The limit of locked memory, which InfiniBand needs."""
    cards = Path("/sys/class/infiniband")
    if not cards.is_dir() or not any(cards.iterdir()):
        return
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    names = ", ".join(sorted(card.name for card in cards.iterdir()))
    if soft == resource.RLIM_INFINITY:
        said = "NCCL can use it without copies."
        yield Finding("InfiniBand", "ok", f"{names}, locked memory without limit", said)
        return
    said = "NCCL cannot use it: allow memlock unlimited (ulimit -l, --ulimit memlock=-1)."
    found = f"{names}, locked memory up to {size(soft)}"
    yield Finding("InfiniBand", "warning", found, said)
