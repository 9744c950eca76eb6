"""One process per device: when a `MirroredStrategy` spans a job's workers, and starts them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Literal, get_args

from kerasdist.api.options import require_choice
from kerasdist.backends.base.interface import Backend
from kerasdist.cluster import detection, kerasdist_variables
from kerasdist.cluster.kerasdist_variables import EACH_ITS_OWN, JOINED, MIRRORED
from kerasdist.cluster.source import Absent
from kerasdist.core.backend_choice import WANT_PROCESS_A_DEVICE
from kerasdist.core.devices import Device, parse_devices
from kerasdist.core.user_warnings import warn_user
from kerasdist.errors import UnsupportedError
from kerasdist.job.job import current_job
from kerasdist.launch import ranks
from kerasdist.launch.ranks import Ranks

Launcher = Literal["processes", "threads"]

# The devices by rank of the job that this process has joined by a `MirroredStrategy`, as the
# variable has told them; and the other workers, if this process has started them.
_joined: list[str] = []
_ranks: list[Ranks] = []


def checked_launcher(launcher: Launcher | None, backend: Backend) -> Launcher | None:
    """Returns a strategy's argument `launcher`, if it is valid and the backend can have it."""
    require_choice("launcher", launcher, (None, *get_args(Launcher)))
    if launcher == "processes" and backend.name not in WANT_PROCESS_A_DEVICE:
        raise UnsupportedError(
            f"Expected launcher=None or 'threads': on {backend.name} one process drives all "
            "devices. Received: launcher='processes'. Leave the argument out; or start workers by "
            "`kerasdist run --workers N` and make a kerasdist.MultiWorkerMirroredStrategy()."
        )
    return launcher


def told_devices() -> str | None:
    """Returns what this process is told of its devices as a worker of a `MirroredStrategy`.

    None: it is no such worker, or multiprocessing has started it, as data loaders do.
    """
    if ranks.is_child():
        return None
    told = os.environ.get(MIRRORED) or None
    if current_job() is not None:
        return _joined[0] if _joined else told
    return None if told == JOINED else told


def are_started_by_script() -> bool:
    """Returns whether the job's workers are those that this script starts, not a launcher's.

    Other strategies are then as right in each worker as in the one that the user has started; so
    they are in a process that multiprocessing has started, which takes no part in the job.
    """
    told = told_devices() or os.environ.get(MIRRORED)
    return bool(told) and (ranks.is_child() or told not in (EACH_ITS_OWN, JOINED))


def are_wanted(backend: Backend, devices: Sequence[Device], launcher: Launcher | None) -> bool:
    """Returns whether this script is to be started again for each device but the first."""
    if launcher == "threads" or len(devices) < 2 or ranks.is_child():
        return False
    if backend.name not in WANT_PROCESS_A_DEVICE:
        return False
    why_not = ranks.why_not_again() or _other_job()
    if launcher == "processes":
        if why_not is None:
            return True
        raise UnsupportedError(
            f"Expected a script that can be started again for each device; but {why_not}. "
            "Received: launcher='processes'. Leave the argument out, or make the strategy in a "
            f"function and call kerasdist.launch(function, workers={len(devices)})."
        )
    if devices[0].kind == "cpu":
        return False
    why_not = why_not or ranks.why_not_unasked()
    if why_not is None:
        return True
    warn_user(
        f"Threads of one process compute on {len(devices)} devices, since {why_not}. One of them "
        "at a time runs Python, so this is often no faster than one device. A process a device is: "
        'in a notebook by kerasdist.launch(function, workers="gpu"), with the strategy in the '
        "function; for a script by `kerasdist run --workers gpu script.py`. "
        'MirroredStrategy(launcher="threads") keeps the threads without this warning.'
    )
    return False


def start(devices: Sequence[Device]) -> str:
    """Starts this script again for each device but the first; returns the devices by rank."""
    names = _by_rank(devices)
    told = ",".join(names)
    _ranks.append(Ranks(ranks.command(), names, {MIRRORED: told}))
    return told


def checked_names(
    names: Sequence[str] | None, told: str, workers: int, rank: int
) -> list[str] | None:
    """Returns the names of a worker's device; None: it takes what it sees.

    Args:
        names: The devices that the script names; None: all.
        told: What `told_devices` returns.
        workers: How many workers there are.
        rank: The number of this one.
    """
    if told != EACH_ITS_OWN:
        return [told.split(",")[rank]]
    if names is None:
        return None
    devices = parse_devices(names)
    if len(devices) != workers:
        raise UnsupportedError(
            f"Expected a device for each of the {workers} workers that a launcher has started. "
            f"Received: devices={[str(device) for device in devices]}. Leave devices out, or start "
            f"{len(devices)} workers."
        )
    return ["cpu:0"] if devices[0].kind == "cpu" else None


def check_same(devices: Sequence[Device], told: str) -> None:
    """Refuses devices that are not those for which the workers were started."""
    if ",".join(_by_rank(devices)) != told:
        raise UnsupportedError(
            f"Expected the devices for which this script has started its processes: {told}. "
            f"Received: devices={[str(device) for device in devices]}. Name the same devices in "
            "each strategy, or a single one; or use launcher='threads' in all of them."
        )


def after_joining(told: str) -> None:
    """Records that this process has joined its job by a `MirroredStrategy`."""
    if not _joined:
        _joined.append(told)
        os.environ[MIRRORED] = JOINED
        for ranks in _ranks:
            ranks.pass_on_interrupts()


def _by_rank(devices: Sequence[Device]) -> list[str]:
    # CPU devices are a process's own: each takes its first.
    return ["cpu:0" if device.kind == "cpu" else str(device) for device in devices]


def _other_job() -> str | None:
    """Returns why this process is a worker already, or a job of its own; None if it is neither."""
    if kerasdist_variables.is_independent(None):
        return f"{kerasdist_variables.CLUSTER}=none makes this process a job of its own"
    for finding in detection.findings():
        if not finding.source.is_of_place and not isinstance(finding.answer, Absent):
            return f"{finding.source.name} has started this process as a worker"
    return None
