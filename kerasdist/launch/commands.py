"""The command that starts a worker under guard, here or through ssh."""

from __future__ import annotations

import os
import shlex
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

from kerasdist.job.secret import SECRET
from kerasdist.launch import environment, guard
from kerasdist.launch.placement import Seat
from kerasdist.launch.spec import JobSpec

# BatchMode: ssh fails where it would ask for a password, and wait for ever. The others end a
# connection that is silent for half a minute.
_SSH = (
    *("ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=20"),
    *("-o", "ServerAliveInterval=10", "-o", "ServerAliveCountMax=3"),
)


def here(spec: JobSpec, seat: Seat, inherited: socket.socket | None = None) -> list[str]:
    """Returns the command for a worker on this machine.

    Args:
        spec: The job.
        seat: The worker's place.
        inherited: A socket that the worker inherits.
    """
    passed = [] if inherited is None else ["--pass-fd", str(inherited.fileno())]
    # By path, isolated and without site packages, it starts in 20 ms.
    return [sys.executable, "-I", "-S", guard.__file__, *passed, *_rest(spec, seat)]


def there(spec: JobSpec, seat: Seat, variables: Mapping[str, str]) -> list[str]:
    """Returns the ssh command for a worker on another machine.

    That machine has the same interpreter and the same folders, as with ``mpirun``.

    Args:
        spec: The job. The first word of its command is the interpreter.
        seat: The worker's place, on a host.
        variables: What its environment has beyond that machine's own.
    """
    assert seat.host is not None
    carried = {**environment.for_another_machine(os.environ), **variables}
    carried.pop(SECRET, None)  # every user of a machine sees the arguments of all processes
    words = [
        *("env", *(f"{name}={value}" for name, value in carried.items())),
        # -P: a script's folder that has a module `signal` must not stop the guard.
        *(spec.command[0], "-P", "-m", guard.__name__, "--secret-on-input", *_rest(spec, seat)),
    ]
    folder = shlex.quote(str(spec.directory or Path.cwd()))
    return [*_SSH, seat.host, f"cd {folder} && exec {shlex.join(words)}"]


def _rest(spec: JobSpec, seat: Seat) -> list[str]:
    """Returns the guard's options, and the worker's command."""
    options = ["--grace", str(spec.stop_seconds)]
    options += ["--share", str(seat.local_workers), "--seat", str(seat.local_rank)]
    return [*options, "--", *spec.command]
