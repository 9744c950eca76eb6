"""Chooses the devices of a strategy: all, the named ones, or a worker's share of the GPUs.

Workers agree on their GPUs before the framework starts, and then check whether the framework sees
these GPUs.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

from kerasdist import config
from kerasdist.backends.base.interface import Backend
from kerasdist.cluster import detection, kerasdist_variables
from kerasdist.cluster.resolver import ClusterResolver
from kerasdist.core import gpus
from kerasdist.core.devices import GPU_BUILDS, Device, check_available, parse_devices
from kerasdist.core.user_warnings import warn_user
from kerasdist.errors import DeviceError, JobError, UnsupportedError
from kerasdist.job.job import Job, current_job
from kerasdist.strategies import processes


def require_no_other_workers(strategy: str) -> None:
    """Raises an error if a worker that has not joined its job makes a strategy of one process.

    Without this error each worker would train by itself on all data, and nobody would notice. A
    worker that has joined its job may also make a strategy of one process.
    """
    if current_job() is not None or processes.are_started_by_script():
        return
    resolver = detect_workers()
    if resolver is not None:
        place = resolver.membership()
        raise JobError(
            f"[worker {place.rank}/{place.num_workers}] Expected a strategy over all "
            f"{place.num_workers} workers of this job, which {place.source} describes. Received: "
            f"{strategy}, a strategy of one process: each worker would train a model by itself, on "
            "all data. Use kerasdist.MultiWorkerMirroredStrategy() or kerasdist.auto(). If the "
            f"workers are to be independent, set the variable {kerasdist_variables.CLUSTER}=none."
        )


def detect_workers() -> ClusterResolver | None:
    """Returns what `kerasdist.cluster.detect` finds; None for an evaluator or parameter server."""
    try:
        return detection.detect()
    except UnsupportedError:
        return None


def chosen_devices(
    backend: Backend, names: Sequence[str] | None, needed: Sequence[str] = ()
) -> tuple[Device, ...]:
    """Returns the devices of a strategy.

    If ``names`` is None, the result is all accelerators of this machine. If the machine has no
    accelerator, or if ``KERASDIST_CPU_DEVICES`` is set, the result is all its CPU devices instead.
    ``needed`` names further devices that must exist, such as the one that holds the variables.

    If the backend has not started yet, this call first makes those CPU devices of ``names`` and
    ``needed`` that do not exist. Then it starts the backend. Once JAX or TensorFlow has started, it
    can make no further CPU devices.
    """
    wanted = prepare(backend, names, needed)
    for kind in sorted({device.kind for device in wanted}):
        require_available(backend, [device for device in wanted if device.kind == kind])
    if names is not None:
        return parse_devices(names)
    accelerators = () if config.wants_cpu_devices() else backend.accelerators()
    if not accelerators and not config.wants_cpu_devices():
        check_promise(backend)
    return accelerators or backend.devices("cpu")


def require_available(backend: Backend, devices: Sequence[Device]) -> None:
    """Raises a DeviceError if this machine lacks one of `devices`, which must be of one kind.

    This function starts the backend.
    """
    available = backend.devices(devices[0].kind)
    check_available(devices, available, backend.name, backend.devices("cpu"))


def prepare(
    backend: Backend, names: Sequence[str] | None, needed: Sequence[str] = ()
) -> list[Device]:
    """Makes the CPU devices among the named devices, without starting the backend.

    Only CPU devices that are numbered from 0 without a gap can be made; any other device must
    already exist. Returns all named devices, each of them once.
    """
    config.apply_cpu_devices_variable()
    named = () if names is None else parse_devices(names)
    wanted = list(dict.fromkeys([*named, *(parse_devices([name])[0] for name in needed)]))
    cpus = [device.index for device in wanted if device.kind == "cpu"]
    if sorted(cpus) == [*range(len(cpus))] and cpus:
        backend.prepare_cpu_devices(len(cpus))
    return wanted


_ON_CPUS = f"set {gpus.CUDA} to nothing, or {config.CPU_DEVICES_VARIABLE}=1"


@final
@dataclass(frozen=True)
class Choice:
    """The GPUs that a worker takes.

    Attributes:
        numbers: The numbers of these GPUs among the GPUs that the process sees, in order; None for
            all.
        peers: If this worker looked for GPUs before the framework started and found none: the ranks
            of this worker and of all others on this machine that found none either; otherwise
            empty. If the framework finds GPUs, `own_part` divides them among these workers.
    """

    numbers: list[int] | None
    peers: list[int] = field(default_factory=list[int])


def agree(backend: Backend, job: Job, names: Sequence[str] | None) -> Choice:
    """Returns the GPUs that this worker takes.

    Workers that see the same GPUs divide these GPUs among them. Workers that compute on CPUs, or
    for which the user has named devices, do not take part in this division. All workers must call
    this function before the framework starts.

    Args:
        backend: The backend of the workers.
        job: The job of this process.
        names: The devices that the user has named.

    Raises:
        DeviceError: If there are too few GPUs, or a named device does not exist.
    """
    named = None if names is None else parse_devices(names)
    on_cpus = named is None and config.wants_cpu_devices()
    found = () if on_cpus else gpus.visible()
    visible = found if found and backend.uses_gpus() else ()
    shown = [gpu.uuid for gpu in visible] if named is None else []
    seen = job.all_gather_object("GPUs that workers see", [platform.node(), shown])
    if on_cpus:
        return Choice([])
    if not visible:
        here = platform.node()
        without = [rank for rank, (host, uuids) in enumerate(seen) if host == here and not uuids]
        return Choice(None, [] if found else without)
    if named is not None:
        wanted = [device for device in named if device.kind == "gpu"]
        existing = [Device("gpu", index) for index in range(len(visible))]
        check_available(wanted, existing, backend.name, ())
        return Choice(sorted(device.index for device in wanted) or None)
    own = gpus.own_share(seen, job.rank)
    sharing = [rank for rank, (_, theirs) in enumerate(seen) if set(theirs) == set(shown)]
    idle = len(shown) - len(own) * len(sharing)
    if idle and job.rank == sharing[0]:
        warn_user(
            f"{job.who} {idle} of the {len(shown)} GPUs of {platform.node()} stay idle: its "
            f"{len(sharing)} workers have {len(own)} each."
        )
    return Choice(sorted(shown.index(uuid) for uuid in own))


def devices_of_worker(
    backend: Backend, numbers: Sequence[int], found: Sequence[Device], names: Sequence[str] | None
) -> list[Device]:
    """Returns a worker's devices, with the names that the framework has given them.

    Args:
        backend: The backend, after `connect`.
        numbers: The attribute `numbers` of the worker's `Choice`; it must not be empty.
        found: The result of `Backend.connect`.
        names: The devices that the user has named, by the names that they had before `connect`.

    Raises:
        DeviceError: If the framework does not see all of these devices.
    """
    if len(found) != len(numbers):
        raise _unseen(backend, [gpus.visible()[number] for number in numbers], len(found))
    if names is None:
        return list(found)
    new_names = dict(zip(numbers, found, strict=True))
    return [
        new_names[device.index] if device.kind == "gpu" else device
        for device in parse_devices(names)
    ]


def own_part(devices: Sequence[Device], peers: Sequence[int], rank: int) -> Sequence[Device]:
    """Returns those of the framework's devices that a worker uses.

    Usually a worker uses all of them, because its GPUs were chosen before the framework started. In
    a container without NVML (``NVIDIA_DRIVER_CAPABILITIES=compute``), only the framework finds
    GPUs. In this case, this function divides the GPUs among the workers in `peers`.

    Args:
        devices: The devices that the framework sees.
        peers: The attribute `peers` of the worker's `Choice`.
        rank: The worker's rank.
    """
    if devices[0].kind != "gpu" or rank not in peers:
        return devices
    own = gpus.part(len(devices), len(peers), peers.index(rank))
    # `own` is empty if this worker sees fewer GPUs than there are workers in `peers`. In this case
    # the workers see different GPUs, so each worker takes all GPUs that it sees.
    return [devices[index] for index in own] or devices


def check_promise(backend: Backend) -> None:
    """Warns or raises an error if this process would use CPUs although the machine has a GPU.

    This function is called if the framework sees no accelerator. It warns if the framework is built
    for CPUs. It raises an error if the framework is built for GPUs, or if an environment variable
    gives GPUs to this process, because the user then wants GPUs.
    """
    visible, asked = gpus.visible(), gpus.are_named(os.environ)
    built = backend.uses_gpus() if visible or asked else None
    # `built` is None in two cases: there is no GPU, and no environment variable names one; or the
    # user has restricted which GPUs the framework may use.
    if built is None:
        return
    if visible and (built or asked):
        raise _unseen(backend, visible, 0)
    job = current_job()
    if visible and (job is None or job.is_chief):
        warn_user(
            f"This machine has {len(visible)} GPUs that {backend.name}, which is built for CPUs, "
            f"does not use. Install {GPU_BUILDS[backend.name]}; to compute on CPUs, {_ON_CPUS}."
        )
    problem = gpus.driver_problem() if asked and not visible else None
    if problem is not None:
        raise DeviceError(
            f"Expected the GPUs that a variable gives to this process. Received: "
            f"{gpus.CUDA}={os.environ.get(gpus.CUDA)!r}, and NVIDIA's driver says {problem!r}. "
            f"`nvidia-smi` should say the same: repair the driver; or, for CPUs, {_ON_CPUS}."
        )


def _unseen(backend: Backend, expected: Sequence[gpus.Gpu], found: int) -> DeviceError:
    cause = (
        f"Its driver may be too old for this {backend.name}, or a library of CUDA is missing: look "
        f"at `nvidia-smi`, and at what {backend.name} has said above"
        if backend.uses_gpus()
        else f"This {backend.name} is built for CPUs: install {GPU_BUILDS[backend.name]}"
    )
    return DeviceError(
        f"Expected {backend.name} to see the GPUs of this process. Received: "
        f"gpus={[f'{gpu.uuid} ({gpu.name})' for gpu in expected]} on {platform.node()}, of which "
        f"it sees {found or 'none'}. {cause}. To compute on CPUs, {_ON_CPUS}."
    )
