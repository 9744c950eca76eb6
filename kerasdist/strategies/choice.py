"""The devices of a strategy: all of the machine's, or the named ones."""

from __future__ import annotations

from collections.abc import Sequence

from kerasdist import config
from kerasdist.backends.base.interface import Backend
from kerasdist.cluster import detection, kerasdist_variables
from kerasdist.core.devices import Device, check_available, parse_devices
from kerasdist.errors import JobError, UnsupportedError
from kerasdist.job import current
from kerasdist.strategies import gpu_choice, processes


def require_no_other_workers(strategy: str) -> None:
    """Refuses a strategy of one process in a worker of a job that has not been joined.

    Each worker would train by itself, on all data, and nothing would show it. A worker that has
    joined the job may use such a strategy beside it.
    """
    if current.current() is not None or processes.are_started_by_script():
        return
    try:
        resolver = detection.detect()
    except UnsupportedError:  # an evaluator, which works by itself
        return
    if resolver is not None:
        place = resolver.membership()
        raise JobError(
            f"[worker {place.rank}/{place.num_workers}] Expected a strategy over all "
            f"{place.num_workers} workers of this job, of which {place.source} tells. Received: "
            f"{strategy}, which is of one process: each worker would train a model by itself, on "
            "all data. Use kerasdist.MultiWorkerMirroredStrategy() or kerasdist.auto(). If the "
            f"workers are to be independent, set the variable {kerasdist_variables.CLUSTER}=none."
        )


def chosen_devices(
    backend: Backend, names: Sequence[str] | None, needed: Sequence[str] = ()
) -> tuple[Device, ...]:
    """Returns a strategy's devices.

    No names stand for all accelerators of this machine; or for all its CPU devices, where there is
    none, or ``KERASDIST_CPU_DEVICES`` is set. CPU devices that do not exist yet are prepared while
    the backend has not started. Asking for devices starts it, so those of ``needed`` are prepared
    together with them.
    """
    wanted = prepare(backend, names, needed)
    for kind in sorted({device.kind for device in wanted}):
        require_available(backend, [device for device in wanted if device.kind == kind])
    if names is not None:
        return parse_devices(names)
    accelerators = () if config.wants_cpu_devices() else backend.accelerators()
    if not accelerators and not config.wants_cpu_devices():
        gpu_choice.check_promise(backend)
    return accelerators or backend.devices("cpu")


def require_available(backend: Backend, devices: Sequence[Device]) -> None:
    """Refuses devices of one kind that this machine does not have; starts the backend."""
    available = backend.devices(devices[0].kind)
    check_available(devices, available, backend.name, backend.devices("cpu"))


def prepare(
    backend: Backend, names: Sequence[str] | None, needed: Sequence[str] = ()
) -> list[Device]:
    """Prepares the CPU devices among the named ones, without starting the backend.

    Those that are numbered from 0 without a gap; any other must be there already. Returns all that
    are named, once each.
    """
    config.apply_cpu_devices_variable()
    named = () if names is None else parse_devices(names)
    wanted = list(dict.fromkeys([*named, *(parse_devices([name])[0] for name in needed)]))
    cpus = [device.index for device in wanted if device.kind == "cpu"]
    if sorted(cpus) == [*range(len(cpus))] and cpus:
        backend.prepare_cpu_devices(len(cpus))
    return wanted
