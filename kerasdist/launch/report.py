"""The messages of the launcher: at the start of a job, and about failures."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Sequence

from kerasdist.cluster import kerasdist_variables
from kerasdist.config import CPU_DEVICES_VARIABLE
from kerasdist.core.backend_choice import KNOWN, VARIABLE, backend_choice
from kerasdist.job.comparison import NAMED
from kerasdist.launch import environment
from kerasdist.launch.beginning import log_file
from kerasdist.launch.placement import Slot
from kerasdist.launch.spec import AttemptResult, JobSpec, WorkerExit

_SSH_FAILED = 255


def of_attempt(result: AttemptResult, spec: JobSpec, number: int) -> str:
    """Returns the message after an attempt; for a success only that no worker joined the job."""
    total = len(result.endings)
    lines: list[str] = []
    why_killed = (
        "was told to stop a second time"
        if result.stopped_twice
        else f"did not stop within {spec.stop_seconds:g} s"
    )
    if result.signal is not None:
        lines.append(f"stopped by {signal.Signals(result.signal).name}")
    if result.preempted:
        lines.append("the job was preempted, and has backed up")
    elif result.cause is not None:
        lines += _of_failure(result.cause, total)
        log = log_file(spec.logs, number, result.cause.rank)
        if log is not None:
            lines.append(f"all of its output is in {log}")
        if result.cause.exit_code == _SSH_FAILED and spec.hosts:
            lines.append("255 is also what ssh ends with where it cannot reach a host")
    killed = [each.rank for each in result.endings if each.killed]
    lines += [f"worker {rank}/{total} {why_killed}, and was killed" for rank in killed[:NAMED]]
    if len(killed) > NAMED:
        lines.append(f"so were {len(killed) - NAMED} others")
    if result.apart and not kerasdist_variables.is_independent({**os.environ, **spec.environment}):
        lines.append(
            f"warning: {total} workers ran, and none joined the job: if the script trains, each "
            "worker trained by itself, on all data, and the results are not one model. Make the "
            "strategy by kerasdist.MultiWorkerMirroredStrategy() or kerasdist.auto(), and the "
            f"model in its scope. {kerasdist_variables.CLUSTER}=none says that they are "
            "to be independent"
        )
    return "\n".join(lines)


def of_start(spec: JobSpec, slots: Sequence[Slot]) -> str:
    """Returns the launcher's first line: how many workers, where, and on which backend."""
    backend = backend_choice({**os.environ, **spec.environment})
    sizes = Counter(slot.host for slot in slots)
    workers = f"{len(slots)} worker{'s'[: len(slots) - 1]}"
    if list(sizes) == [None]:
        where = "on this machine"
    else:
        where = "on " + ", ".join(f"{host or 'here'}:{size}" for host, size in sizes.items())
    chosen = "" if backend.reason == VARIABLE else ", unless the script sets another"
    said = f"{workers} {where}, backend {backend.name} ({backend.reason}{chosen})"
    if slots[0].host is None:
        said += _of_idle_gpus(spec, sizes[None])
    if backend.name not in KNOWN or backend.problem is None or spec.hosts:
        return said  # the workers' machine may have the backend
    return f"{said}\nwarning: {backend.problem}"


def _of_idle_gpus(spec: JobSpec, workers: int) -> str:
    environ = {**os.environ, **spec.environment}
    if workers < 2 or spec.devices_per_worker or environ.get(CPU_DEVICES_VARIABLE):
        return ""
    count = len(environment.offered_gpus(environ)[1])
    each, idle = divmod(count, workers)
    if not (each and idle):
        return ""
    having = f"{workers} workers have {each} each"
    return f"\n{idle} of the {count} GPUs of this machine stay idle: {having}"


def _of_failure(cause: WorkerExit, total: int) -> list[str]:
    lines = [f"worker {cause.rank}/{total} failed after {cause.seconds:.1f} s: {cause.reason}"]
    if cause.last_lines:
        lines += ["its last lines:", *(f"  | {line}" for line in cause.last_lines)]
    return lines
