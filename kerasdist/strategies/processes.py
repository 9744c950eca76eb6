"""Starts one process per device for a `MirroredStrategy`, and decides when that is needed.

The code of this file uses neither Keras nor a framework.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from kerasdist.api.options import require_choice
from kerasdist.cluster import detection, kerasdist_variables
from kerasdist.cluster.kerasdist_variables import EACH_ITS_OWN, JOINED, MIRRORED
from kerasdist.cluster.source import Absent
from kerasdist.core.backend_choice import WANT_PROCESS_A_DEVICE
from kerasdist.core.devices import Device, parse_devices
from kerasdist.core.user_warnings import LIBRARIES, warn_user
from kerasdist.errors import UnsupportedError
from kerasdist.job.job import current_job

if TYPE_CHECKING:
    from kerasdist.backends.base.interface import Backend
    from kerasdist.cli.launch.ranks import Ranks

Launcher = Literal["processes", "threads"]

# `_joined`: empty until this process has joined a job by making a `MirroredStrategy`. Then it has
# one string: the names of all workers' devices, in the order of the ranks, or `EACH_ITS_OWN`.
# `_ranks`: the processes of the other workers, if this process has started them.
_joined: list[str] = []
_ranks: list[Ranks] = []


def is_child() -> bool:
    """Returns whether multiprocessing has started this process, for example for a data loader.

    Such a process first imports the script. During the import `parent_process()` is still None, but
    multiprocessing has set the attribute `_inheriting` of the process.
    """
    this = multiprocessing.current_process()
    return multiprocessing.parent_process() is not None or getattr(this, "_inheriting", False)


def command() -> tuple[str, ...]:
    """Returns the command that starts this program again.

    Call this function only if `why_not_again` returns None.
    """
    words = [sys.executable, *sys.orig_argv[1:]]
    main = sys.modules["__main__"]
    if main.__spec__ is None:  # a script, and not `python -m module`
        # The command may name the script by a relative path. The absolute path replaces it, because
        # the script may have changed the working folder.
        file = str(main.__file__)
        for index, word in enumerate(words[1:], start=1):
            if file == word or file.endswith(f"/{word}"):
                words[index] = file
                break
    return tuple(words)


def why_not_again() -> str | None:
    """Returns why this process cannot be started again; None if it can."""
    file = getattr(sys.modules["__main__"], "__file__", None)
    if file is None or hasattr(sys, "ps1") or sys.flags.interactive or not Path(file).is_file():
        return "this is a notebook, an interactive interpreter or a program without a file"
    return None


def why_not_unasked() -> str | None:
    """Returns why this program should not be started again if the user has not asked for that.

    Returns None if there is no such reason.
    """
    file = str(getattr(sys.modules["__main__"], "__file__", ""))
    if file.startswith(LIBRARIES):
        return f"the program that runs here is not a script of yours, but {file}"
    return None


def checked_launcher(launcher: Launcher | None, backend: Backend) -> Launcher | None:
    """Returns a strategy's argument `launcher` after a check that the backend supports it."""
    require_choice("launcher", launcher, (None, *get_args(Launcher)))
    if launcher == "processes" and backend.name not in WANT_PROCESS_A_DEVICE:
        raise UnsupportedError(
            f"Expected launcher=None or 'threads': on {backend.name} one process drives all "
            "devices. Received: launcher='processes'. Leave the argument out; or start workers by "
            "`kerasdist run --workers N` and make a kerasdist.MultiWorkerMirroredStrategy()."
        )
    return launcher


def devices_from_launcher() -> str | None:
    """Returns the value of the environment variable with the devices of a `MirroredStrategy`.

    Returns None if this process is not a worker of a `MirroredStrategy`, or if multiprocessing has
    started this process.
    """
    if is_child():
        return None
    told = os.environ.get(MIRRORED) or None
    if current_job() is not None:
        return _joined[0] if _joined else told
    return None if told == JOINED else told


def are_started_by_script() -> bool:
    """Returns whether the job's workers are processes that this script itself starts.

    Such a worker may also use strategies of one process, because it runs the same script as the
    process that the user started. The result is also True in a child process that a worker has
    started by multiprocessing. The child process may use these strategies too, because it is not
    in the job.
    """
    told = devices_from_launcher() or os.environ.get(MIRRORED)
    return bool(told) and (is_child() or told not in (EACH_ITS_OWN, JOINED))


def are_wanted(backend: Backend, devices: Sequence[Device], launcher: Launcher | None) -> bool:
    """Returns whether this script must be started once more for each device but the first."""
    if launcher == "threads" or len(devices) < 2 or is_child():
        return False
    if backend.name not in WANT_PROCESS_A_DEVICE:
        return False
    why_not = why_not_again() or _other_job()
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
    why_not = why_not or why_not_unasked()
    if why_not is None:
        return True
    warn_user(
        f"Threads of one process compute on {len(devices)} devices, since {why_not}. Only one "
        "thread at a time runs Python, so this is often no faster than one device. Start a process "
        'for each device: in a notebook by kerasdist.launch(function, workers="gpu"), with the '
        "strategy made in the function; for a script by `kerasdist run --workers gpu script.py`. "
        'MirroredStrategy(launcher="threads") keeps the threads without this warning.'
    )
    return False


def start(devices: Sequence[Device]) -> str:
    """Starts this script again for each device but the first; returns the names of the devices.

    The names are in one string, in the order of the workers' ranks, with commas between them.
    """
    # imported here, because only a script that starts its own processes uses `Ranks`
    from kerasdist.cli.launch.ranks import Ranks

    names = _by_rank(devices)
    told = ",".join(names)
    _ranks.append(Ranks(command(), names, {MIRRORED: told}))
    return told


def checked_names(
    names: Sequence[str] | None, told: str, workers: int, rank: int
) -> list[str] | None:
    """Returns a list with the name of a worker's device, or None for all devices that it sees.

    Args:
        names: The devices that the script names; None for all.
        told: The result of `devices_from_launcher` or `start`.
        workers: How many workers there are.
        rank: The rank of this worker.
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
    """Raises an error if `devices` are not the devices for which the workers were started."""
    if ",".join(_by_rank(devices)) != told:
        raise UnsupportedError(
            f"Expected the devices for which this script has started its processes: {told}. "
            f"Received: devices={[str(device) for device in devices]}. Name the same devices in "
            "each strategy, or a single one; or use launcher='threads' in all of them."
        )


def after_joining(told: str) -> None:
    """Records that this process has joined its job by making a `MirroredStrategy`.

    `told` is the result of `devices_from_launcher` or `start`.
    """
    if not _joined:
        _joined.append(told)
        os.environ[MIRRORED] = JOINED
        for ranks in _ranks:
            ranks.pass_on_interrupts()


def _by_rank(devices: Sequence[Device]) -> list[str]:
    # Each process numbers its CPU devices from 0, so on CPUs each worker's device is "cpu:0".
    return ["cpu:0" if device.kind == "cpu" else str(device) for device in devices]


def _other_job() -> str | None:
    """Returns why this process cannot be the first worker of a job that the script starts.

    The process may already be a worker of another job, or the user may have asked that it trains
    alone. Returns None if neither is the case.
    """
    if kerasdist_variables.is_independent(None):
        return f"{kerasdist_variables.CLUSTER}=none makes this process a job of its own"
    for source, answer in detection.findings().items():
        if not source.is_of_place and not isinstance(answer, Absent):
            return f"{source.name} has started this process as a worker"
    return None
