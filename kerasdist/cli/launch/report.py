"""The launcher's messages: at the start of a job, about failures, and for ``--dry-run``."""

from __future__ import annotations

import shlex
import signal
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from kerasdist.cli.launch import start, supervisor
from kerasdist.cli.launch.placement import Slot, counted, host_of_chief, listed
from kerasdist.cli.launch.spec import AttemptResult, JobSpec
from kerasdist.cli.launch.start import log_file
from kerasdist.cluster import kerasdist_variables
from kerasdist.config import CPU_DEVICES_VARIABLE
from kerasdist.core import gpus
from kerasdist.core.backend_choice import KNOWN, VARIABLE, backend_choice
from kerasdist.core.user_warnings import plural
from kerasdist.job.comparison import NAMED
from kerasdist.job.handshake import JOB_ID, SECRET
from kerasdist.job.launcher import MEMORY


def of_attempt(result: AttemptResult, spec: JobSpec, number: int) -> str:
    """Returns the launcher's message about an attempt that has ended.

    The message is empty if all workers have succeeded and the launcher got no signal. But if
    several workers ran, and none of them has joined the job, the message is a warning.
    """
    total = len(result.endings)
    lines: list[str] = []
    why_killed = (
        "was told to stop a second time"
        if result.stopped_twice
        else f"did not stop within {spec.stop_seconds:g} s"
    )
    if result.signal is not None:
        lines.append(f"stopped by {signal.Signals(result.signal).name}")
    if result.grows:
        lines.append("the workers have ended at a backup, so that waiting workers can be added")
    elif result.preempted:
        lines.append("the job was preempted, and has backed up")
    elif result.cause is not None:
        cause = result.cause
        lines.append(
            f"worker {cause.rank}/{total} failed after {cause.seconds:.1f} s: {cause.reason}"
        )
        if cause.last_lines:
            lines += ["its last lines:", *(f"  | {line}" for line in cause.last_lines)]
        if spec.logs is not None:
            log = log_file(spec.logs, number, cause.rank)
            lines.append(f"all of its output is in {log}")
        if cause.exit_code == supervisor.LOST and spec.hosts:
            lines.append("ssh, too, ends with exit code 255, if it cannot reach a host")
    killed = [each.rank for each in result.endings if each.killed]
    lines += [f"worker {rank}/{total} {why_killed}, and was killed" for rank in killed[:NAMED]]
    if len(killed) > NAMED:
        lines.append(f"{len(killed) - NAMED} other workers were killed too")
    if result.ran_separately and not kerasdist_variables.is_independent(spec.variables):
        lines.append(
            f"warning: {total} workers ran, and none joined the job: if the script trains, each "
            "worker trained by itself, on all data, and the results are not one model. Make the "
            "strategy by kerasdist.MultiWorkerMirroredStrategy() or kerasdist.auto(), and the "
            "model in its scope. If the workers shall be independent, set "
            f"{kerasdist_variables.CLUSTER}=none"
        )
    return "\n".join(lines)


def of_start(spec: JobSpec, slots: Sequence[Slot]) -> str:
    """Returns the launcher's first message: how many workers, where, and on which backend."""
    backend = backend_choice(spec.variables)
    sizes = Counter(slot.host for slot in slots)
    workers = plural(len(slots), "worker")
    by_host = ", ".join(f"{host or 'here'}:{size}" for host, size in sizes.items())
    where = "on this machine" if list(sizes) == [None] else f"on {by_host}"
    chosen = "" if backend.reason == VARIABLE else ", unless the script sets another"
    said = f"{workers} {where}, backend {backend.name} ({backend.reason}{chosen})"
    if spec.min_workers is not None:
        range_ = f"{spec.min_workers} to {spec.workers} workers"
        restarts = f"{plural(spec.max_restarts, 'restart')} at most"
        said += f"\nthe job goes on with {range_}; {restarts}"
    if slots[0].host is None:
        said += _of_idle_gpus(spec, sizes[None])
    if backend.name not in KNOWN or backend.problem is None or spec.hosts:
        return said  # the hosts, on which the workers run, may have the backend
    return f"{said}\nwarning: {backend.problem}"


def _of_idle_gpus(spec: JobSpec, workers: int) -> str:
    if workers < 2 or spec.devices_per_worker or spec.variables.get(CPU_DEVICES_VARIABLE):
        return ""
    count = len(gpus.offered(spec.variables)[1])
    each, idle = divmod(count, workers)
    if not (each and idle):
        return ""
    having = f"{workers} workers have {each} each"
    return f"\n{idle} of the {count} GPUs of this machine stay idle: {having}"


# `of_dry_run` hides the values of these variables: they are secret, or random at every start.
_HIDDEN = (JOB_ID, MEMORY, SECRET)


def of_dry_run(spec: JobSpec) -> str:
    """Returns what ``--dry-run`` prints: each worker's host, variables and command.

    Raises:
        ClusterError: If the workers cannot be placed on the hosts.
        DeviceError: If there shall be one worker per GPU, but this machine has no GPU.
    """
    spec = counted(spec)
    slots = listed(spec)
    parts = [of_start(spec, slots)]
    given = start.variables_of(spec, slots, f"{host_of_chief(slots)}:<port>", 0)
    for slot, own in zip(slots, given, strict=True):
        where = "on this machine" if slot.host is None else f"on {slot.host}, by ssh"
        lines = [f"worker {slot.rank}/{len(slots)} {where}"]
        lines.append(f"cd {shlex.quote(str(Path.cwd()))}")
        # These are the variables that the launcher gives to the worker.
        variables = start.supervised(spec, slot, own)[0]["variables"]
        variables |= {name: "<hidden>" for name in _HIDDEN if name in variables}
        lines += [f"{name}={text}" for name, text in sorted(variables.items())]
        parts.append("\n  ".join([*lines, shlex.join(spec.command)]))
    return "\n\n".join(parts)
