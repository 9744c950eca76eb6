"""What ``kerasdist run --dry-run`` prints: each worker's host, variables and command."""

from __future__ import annotations

import os
import shlex
import socket
from collections.abc import Sequence
from pathlib import Path

from kerasdist.job.secret import JOB_ID, SECRET
from kerasdist.launch import environment, report
from kerasdist.launch.placement import Slot, place
from kerasdist.launch.spec import JobSpec
from kerasdist.launch.worker_count import counted

# Variables whose values are random at every start, or secret.
_HIDDEN = (JOB_ID, SECRET)


def described(spec: JobSpec) -> str:
    """Returns the workers that a job would start.

    Raises:
        ClusterError: If the workers cannot be placed.
        DeviceError: If there is to be a worker a GPU, and there is none.
    """
    spec = counted(spec)
    slots = place(spec.workers, spec.hosts)
    parts = [report.of_start(spec, slots)]
    for slot in slots:
        where = "on this machine" if slot.host is None else f"on {slot.host}, by ssh"
        lines = [f"worker {slot.rank}/{len(slots)} {where}"]
        lines.append(f"cd {shlex.quote(str(spec.directory or Path.cwd()))}")
        lines += [f"{name}={text}" for name, text in _variables(spec, slot, slots)]
        parts.append("\n  ".join([*lines, shlex.join(spec.command)]))
    return "\n\n".join(parts)


def _variables(spec: JobSpec, slot: Slot, slots: Sequence[Slot]) -> list[tuple[str, str]]:
    """Returns what a worker has in its environment beyond this process's own, or that of ssh."""
    coordinator = f"{_chief(slots)}:<port>"
    variables = environment.of_worker(spec, slot, len(slots), coordinator, 0)
    variables |= environment.of_job(spec, 0)
    if slot.host is None:
        here = sum(each.host is None for each in slots)
        of_gpus = environment.of_gpus({**os.environ, **spec.environment}, here)
        variables |= environment.of_threads(here) | of_gpus[slot.local_rank]
    else:
        variables = {**environment.for_another_machine(os.environ), **variables}
    variables |= dict.fromkeys([name for name in _HIDDEN if name in variables], "<hidden>")
    return sorted(variables.items())


def _chief(slots: Sequence[Slot]) -> str:
    """Returns the name by which workers look for the chief."""
    if slots[0].host is not None:
        return slots[0].host.rpartition("@")[2]
    return "127.0.0.1" if all(slot.host is None for slot in slots) else socket.gethostname()
