"""The launcher's side of a worker."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

from kerasdist.launch import supervisor
from kerasdist.launch.output import LogFile, Pump, Screen, last_lines_of
from kerasdist.launch.spec import WorkerExit


@final
@dataclass(frozen=True)
class Exited:
    """A worker has ended."""

    rank: int


@final
@dataclass(frozen=True)
class Signalled:
    """The launcher got a signal to stop the job."""

    number: int


Event = Exited | Signalled


@final
@dataclass(frozen=True)
class Start:
    """How a worker is started.

    Attributes:
        rank: The worker's number.
        name: The prefix of the lines that it prints.
        command: The command that starts its supervisor.
        variables: What its environment has beyond this process's own.
        directory: Where it runs; None: where this process does.
        log: The file for its output; None: the screen.
        carried: The variables that the supervisor on another machine reads from its standard
            input; None: it has them from its environment.
        inherited: The files that the worker inherits.
        reports: The pipe that carries its reports; None: its output carries them, if it sends any.
        told: Is called with each of its reports; None: it sends none.
    """

    rank: int
    name: str
    command: Sequence[str]
    variables: Mapping[str, str]
    directory: Path | None
    log: Path | None
    carried: Mapping[str, str] | None = field(default=None, repr=False)
    inherited: Sequence[int] = ()
    reports: int | None = None
    told: Callable[[bytes], None] | None = None


@final
class Worker:
    """A worker that is running, under its supervisor."""

    def __init__(self, start: Start, screen: Screen, events: queue.SimpleQueue[Event]) -> None:
        self.rank = start.rank
        self._log = start.log
        self._began = time.monotonic()
        self._ended = self._began
        self._stopped = self._killed = False
        by_output = start.told is not None and start.reports is None
        shown = LogFile(start.log) if by_output and start.log is not None else screen
        self._pump = Pump(shown, f"[{start.name}]", start.rank, start.told if by_output else None)
        with contextlib.ExitStack() as files:
            direct = start.log is not None and not by_output
            file = files.enter_context(start.log.open("wb")) if direct and start.log else None
            self._process = subprocess.Popen(
                start.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if file is None else file,
                stderr=subprocess.PIPE if file is None else subprocess.STDOUT,
                env={**os.environ, **start.variables},
                cwd=start.directory,
                # Ctrl-C is for the launcher, which passes it on.
                start_new_session=True,
                pass_fds=start.inherited,
            )
        if start.carried is not None:
            self._order(json.dumps(dict(start.carried)))
        if self._process.stdout is not None and self._process.stderr is not None:
            self._pump.start(self._process.stdout, sys.stdout)
            self._pump.start(self._process.stderr, sys.stderr)
        if start.reports is not None and start.told is not None:
            threading.Thread(target=_pass_on, args=(start.reports, start.told), daemon=True).start()
        threading.Thread(target=self._wait, args=(events,), daemon=True).start()

    @property
    def running(self) -> bool:
        """Whether the worker has not ended yet."""
        return self._process.poll() is None

    @property
    def exit_code(self) -> int:
        """The worker's exit code, 128 + n if signal n ended it, once it has ended."""
        code = self._process.wait()
        return 128 - code if code < 0 else code

    def stop(self, number: int) -> None:
        """Passes a signal on to the worker."""
        self._stopped = True
        self._order(f"signal {number}")

    def _order(self, line: str) -> None:
        """Writes a line that the supervisor reads."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError, ValueError):
            self._process.stdin.write(f"{line}\n".encode())
            self._process.stdin.flush()

    def kill(self) -> None:
        """Has the supervisor end the worker at once; see `kill_supervisor` if it does not."""
        self._stopped = self._killed = True
        self.stop(signal.SIGKILL)

    def let_go(self) -> None:
        """Closes a forked process's copy of the pipe: its end has the supervisor end the worker."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def kill_supervisor(self) -> None:
        """Ends the supervisor, or ssh, that does not answer; the kernel ends the worker with it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def ending(self, deadline: float) -> WorkerExit:
        """Returns how the worker has ended."""
        exit_code = self.exit_code
        lines = self._pump.last_lines(deadline)
        if self._log is not None:
            lines = last_lines_of(self._log)
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        return WorkerExit(
            rank=self.rank,
            exit_code=exit_code,
            seconds=self._ended - self._began,
            stopped=self._stopped,
            killed=self._killed,
            last_lines=lines,
            joined=supervisor.APART not in lines,
        )

    def _wait(self, events: queue.SimpleQueue[Event]) -> None:
        self._process.wait()
        self._ended = time.monotonic()
        events.put(Exited(self.rank))


def _pass_on(reports: int, told: Callable[[bytes], None]) -> None:
    with os.fdopen(reports, "rb") as lines:
        for line in lines:
            told(line)
