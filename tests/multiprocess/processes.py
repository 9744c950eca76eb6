"""Real processes under a time limit, with all that they print."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.environment import WORKERS, values

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Ended:
    """How a process ended; `code` is None for one that had to be killed."""

    rank: int
    code: int | None
    seconds: float
    output: str


class Processes:
    """Several processes, begun together; leaving the block kills what is left of them."""

    def __init__(
        self, commands: Sequence[Sequence[str]], environments: Sequence[Mapping[str, str]] = ()
    ):
        environments = environments or [{}] * len(commands)
        self._began = time.monotonic()
        # Not in a `with`: they are read until the processes are gone.
        self._logs = [tempfile.TemporaryFile() for _ in commands]  # noqa: SIM115
        self.processes = [
            subprocess.Popen(
                [sys.executable, *command],
                cwd=ROOT,
                env={**os.environ, **values(WORKERS), **environment},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            for command, environment, log in zip(commands, environments, self._logs, strict=True)
        ]

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, *error: object):
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)
        for log in self._logs:
            log.close()

    def join(self, seconds: float, but: Sequence[int] = ()) -> list[Ended]:
        """Waits for all, except those that cannot end by themselves."""
        deadline = time.monotonic() + seconds
        ended: dict[int, float] = {}
        waited = [rank for rank in range(len(self.processes)) if rank not in but]
        while len(ended) < len(waited) and time.monotonic() < deadline:
            for rank in waited:
                if rank not in ended and self.processes[rank].poll() is not None:
                    ended[rank] = time.monotonic() - self._began
            time.sleep(0.02)
        return [
            Ended(
                rank,
                process.poll(),
                ended.get(rank, time.monotonic() - self._began),
                self.output(rank),
            )
            for rank, process in enumerate(self.processes)
        ]

    def output(self, rank: int) -> str:
        log = self._logs[rank]
        size = os.fstat(log.fileno()).st_size
        return os.pread(log.fileno(), size, 0).decode("utf-8", "replace")


def report(ended: Sequence[Ended]) -> str:
    """Every rank's log, for the message of a test that fails."""
    return "\n".join(
        f"----- worker {one.rank}: exit code {one.code} after {one.seconds:.1f} s\n{one.output}"
        for one in ended
    )
