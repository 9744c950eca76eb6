"""What the launcher says of an attempt that did not succeed."""

from __future__ import annotations

import signal

from kerasdist.launch.beginning import log_file
from kerasdist.launch.spec import AttemptResult, Ending, JobSpec

_SSH_FAILED = 255


def of_attempt(result: AttemptResult, spec: JobSpec, number: int) -> str:
    """Returns what is to be said, nothing of a success.

    Args:
        result: How the attempt has ended.
        spec: The job.
        number: How often it was started before.
    """
    total = len(result.endings)
    lines: list[str] = []
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
    lines += [
        f"worker {each.rank}/{total} did not stop within {spec.stop_seconds:g} s, and was killed"
        for each in result.endings
        if each.killed
    ]
    return "\n".join(lines)


def _of_failure(cause: Ending, total: int) -> list[str]:
    lines = [f"worker {cause.rank}/{total} failed after {cause.seconds:.1f} s: {cause.reason}"]
    if cause.last_lines:
        lines += ["its last lines:", *(f"  | {line}" for line in cause.last_lines)]
    return lines
