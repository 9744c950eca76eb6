"""The description of a job, and of how it has ended."""

from __future__ import annotations

import os
import secrets
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal, final

from kerasdist.job.interruption import ExitCode
from kerasdist.job.launcher import ProfiledSteps

GPU = "gpu"
"""As the number of workers, this value means one worker per GPU of this machine."""

STOP_SECONDS = 20.0
"""How long workers have from SIGTERM to SIGKILL: less than the 30 s that Kubernetes gives a pod."""


@final
@dataclass(frozen=True)
class JobSpec:
    """A job to start.

    Example::

        spec = JobSpec(command=python_command("train.py"), workers=4, max_restarts=2)

    Attributes:
        command: The command that every worker runs; `python_command` returns such a command.
        workers: The number of workers. ``"gpu"`` means one per GPU of this machine, or one per slot
            if there are hosts. None means one per slot of the hosts; without hosts it means one per
            GPU on PyTorch, and a single worker on other backends.
        min_workers: The job continues while at least this many workers are left; None means all.
        devices_per_worker: How many CPU devices each worker sets up; None: its script decides.
        max_restarts: How often the whole job may be restarted after a failure.
        hosts: ``host`` or ``host:slots``, or lists of hosts in Slurm's notation. Empty means this
            machine.
        logs: A folder with one file per attempt and worker, and one file with the last state of all
            workers. None: this process prints the workers' lines.
        live: Whether this process's terminal shows all workers in a table that is kept up to date.
        profile: The steps that every worker profiles; None for no profile.
        stop_seconds: How long workers have from SIGTERM to SIGKILL.
        environment: Additional variables for the workers, which workers on other machines get too.
        join_port: The port on which the launcher listens for machines that join. 0: any free port.
            None: no machine can join. The job never has more than `workers` workers. A machine
            can join only if it has the job's secret.
        run_id: A name that all attempts of this job have, and no other job has.
    """

    command: Sequence[str]
    workers: int | Literal["gpu"] | None = None
    min_workers: int | None = None
    devices_per_worker: int | None = None
    max_restarts: int = 0
    hosts: Sequence[str] = ()
    logs: Path | None = None
    live: bool = False
    profile: ProfiledSteps | None = None
    stop_seconds: float = STOP_SECONDS
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    join_port: int | None = None
    run_id: str = field(default_factory=partial(secrets.token_hex, 8))

    @property
    def variables(self) -> dict[str, str]:
        """The variables that all workers on this machine get: this process's and `environment`."""
        return {**os.environ, **self.environment}


@final
@dataclass(frozen=True)
class WorkerExit:
    """How a worker has ended.

    Attributes:
        rank: The worker's number.
        exit_code: The worker's exit code; 128 + n if signal n ended the worker.
        seconds: How long the worker ran.
        stopped: Whether the launcher had told the worker to stop.
        killed: Whether the launcher had to kill the worker by SIGKILL.
        joined: Whether the worker joined the job. A worker joins when its script makes a strategy
            for several workers.
        last_lines: The last lines of the worker's output.
    """

    rank: int
    exit_code: int
    seconds: float
    stopped: bool
    killed: bool
    last_lines: tuple[str, ...]
    joined: bool = True

    @property
    def failed_by_itself(self) -> bool:
        """Whether the worker failed, and neither another worker nor a preemption is the cause."""
        consequences = (ExitCode.LOST_WORKER, ExitCode.PREEMPTED)
        return not self.stopped and self.exit_code not in (0, *consequences)

    @property
    def reason(self) -> str:
        """A text for the exit code, such as "ended by SIGKILL"."""
        if self.exit_code == ExitCode.LOST_WORKER:
            return f"exit code {self.exit_code}, because another worker was lost"
        if self.exit_code == ExitCode.PREEMPTED:
            return f"exit code {self.exit_code}, preempted and backed up"
        try:
            return f"ended by {signal.Signals(self.exit_code - 128).name}"
        except ValueError:
            return f"exit code {self.exit_code}"


@final
@dataclass(frozen=True)
class AttemptResult:
    """How one attempt of a job has ended.

    Attributes:
        endings: How each worker has ended, by rank.
        signal: The signal by which the launcher was told to stop; None if there was none.
        stopped_twice: Whether a second signal came, so that the workers were killed at once.
        makes_room: Whether the attempt was ended so that waiting workers can be added.
    """

    endings: tuple[WorkerExit, ...]
    signal: int | None
    stopped_twice: bool = False
    makes_room: bool = False

    @property
    def ran_separately(self) -> bool:
        """Whether there were several workers, and all ended well without joining the job."""
        return len(self.endings) > 1 and not any(
            each.joined or each.exit_code or each.stopped for each in self.endings
        )

    @property
    def cause(self) -> WorkerExit | None:
        """The worker whose failure made the attempt fail; None if no worker failed.

        This is the first worker that failed by itself. If there is none, it is the first worker
        that lost another worker, and otherwise the first worker that was preempted.
        """
        failed = [each for each in self.endings if each.exit_code and not each.stopped]
        return min(
            failed,
            key=lambda each: (
                not each.failed_by_itself,
                each.exit_code == ExitCode.PREEMPTED,
                each.seconds,
            ),
            default=None,
        )

    @property
    def preempted(self) -> bool:
        """Whether a worker was preempted and no worker failed."""
        codes = {each.exit_code for each in self.endings}
        return codes <= {0, ExitCode.PREEMPTED} and ExitCode.PREEMPTED in codes

    @property
    def exit_code(self) -> int:
        """The launcher's own exit code: that of `cause`, or 128 + n after signal n, or 0."""
        if self.preempted:
            return ExitCode.PREEMPTED
        if self.cause is not None:
            return self.cause.exit_code
        if self.signal is not None and any(each.exit_code for each in self.endings):
            return 128 + self.signal
        return 0

    @property
    def failed(self) -> bool:
        """Whether the attempt failed, so that a restart may help.

        A preemption, or a stop because the launcher got a signal, is no failure.
        """
        return self.exit_code not in (0, ExitCode.PREEMPTED) and self.signal is None

    @property
    def grows(self) -> bool:
        """Whether the attempt was ended only so that waiting workers can be added."""
        ended = any(each.exit_code for each in self.endings)
        return self.makes_room and ended and not self.failed and self.signal is None


@final
@dataclass(frozen=True)
class JobResult:
    """How a job has ended.

    Attributes:
        attempts: All attempts, in order.
    """

    attempts: tuple[AttemptResult, ...]

    @property
    def exit_code(self) -> int:
        """The exit code of the last attempt."""
        return self.attempts[-1].exit_code

    @property
    def restarts(self) -> int:
        """How often the job was restarted."""
        return len(self.attempts) - 1


def python_command(
    script: str, arguments: Sequence[str] = (), *, module: bool = False, python: str | None = None
) -> tuple[str, ...]:
    """Returns the command that runs a script, or a module, with an interpreter.

    Example::

        python_command("train.py", ["--epochs", "10"])

    Args:
        script: The path of a script, or the name of a module.
        arguments: The arguments of the script.
        module: Whether `script` is a module.
        python: The interpreter; None for the interpreter of this process.
    """
    return (python or sys.executable, *(["-m"] if module else []), script, *arguments)
