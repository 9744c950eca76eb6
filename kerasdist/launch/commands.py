"""The command that starts a worker under a supervisor, here or through ssh."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from kerasdist.launch import supervisor
from kerasdist.launch.placement import Slot
from kerasdist.launch.spec import JobSpec

# BatchMode: ssh fails where it would ask for a password, and wait forever. The others end a
# connection that is silent for half a minute.
SSH = (
    *("ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=20"),
    *("-o", "ServerAliveInterval=10", "-o", "ServerAliveCountMax=3"),
)
"""How to begin a command on another machine; ``--``, its name and the command follow."""


def here(
    spec: JobSpec, slot: Slot, inherited: Sequence[int] = (), *, must_join: bool = False
) -> list[str]:
    """Returns the command for a worker on this machine.

    Args:
        spec: The job.
        slot: The worker's place.
        inherited: The files that the worker inherits.
        must_join: Whether it is a failure if the worker ends well, but has not joined the job.
    """
    options = [word for number in inherited for word in ("--pass-fd", str(number))]
    options += ["--must-join"] if must_join else []
    # By path, isolated and without site packages, it starts in 20 ms.
    return [sys.executable, "-I", "-S", supervisor.__file__, *options, *_rest(spec, slot)]


def there(spec: JobSpec, slot: Slot, path: str | None, *, reports: bool = False) -> list[str]:
    """Returns the ssh command for a worker on another machine.

    That machine has the same interpreter and the same folders, as with ``mpirun``. Its variables
    come by standard input: every user of a machine sees the arguments of all processes.

    Args:
        spec: The job.
        slot: The worker's place.
        path: ``PYTHONPATH`` there, by which Python finds the supervisor; None: it needs none.
        reports: Whether its output carries the worker's reports.
    """
    assert slot.host is not None
    words = [
        *([] if path is None else ["env", f"PYTHONPATH={path}"]),
        # -P: a script's folder that has a module `signal` must not stop the supervisor.
        *(
            spec.command[0],
            "-P",
            "-m",
            supervisor.__name__,
            "--variables-on-input",
            *(["--relay-status"] if reports else []),
            *_rest(spec, slot),
        ),
    ]
    folder = shlex.quote(str(spec.directory or Path.cwd()))
    return [*SSH, "--", slot.host, f"cd {folder} && exec {shlex.join(words)}"]


def _rest(spec: JobSpec, slot: Slot) -> list[str]:
    """Returns the supervisor's options, and the worker's command."""
    options = ["--grace", str(spec.stop_seconds)]
    options += ["--share", str(slot.local_workers), "--slot", str(slot.local_rank)]
    return [*options, "--", *spec.command]
