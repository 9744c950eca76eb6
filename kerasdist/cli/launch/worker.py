"""The launcher's side of a worker: its process and its output."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import IO, Protocol, TextIO, final

from kerasdist.cli.launch import supervisor
from kerasdist.cli.launch.spec import WorkerExit

LAST_LINES = 20
"""If a worker fails, the launcher shows this many of its last lines again."""

_COLOURS = (36, 33, 35, 32, 34, 31)
_LONGEST_LINE = 1 << 16

_REPORT = re.compile(re.escape(supervisor.MARK) + rb"(.*)\n")

REDRAW_SECONDS = 10.0
"""A line that is redrawn, such as a progress bar, is shown at most once in this many seconds."""


@final
class Screen:
    """The launcher's standard output and error, to which it writes whole lines of all workers."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def write(self, prefix: str, line: str, stream: TextIO, rank: int) -> None:
        """Writes a line of a worker's output, after a prefix that names the worker."""
        if line == supervisor.APART:
            return  # not shown for each worker: the launcher warns once if none has joined the job
        if stream.isatty() and not os.environ.get("NO_COLOR"):
            prefix = f"\x1b[{_COLOURS[rank % len(_COLOURS)]}m{prefix}\x1b[0m"
        self._put([f"{prefix} {line}"], stream)

    def say(self, text: str) -> None:
        """Writes a message of the launcher itself to the error output."""
        self._put([f"[kerasdist] {line}" for line in text.splitlines()], sys.stderr)

    def _put(self, lines: list[str], stream: TextIO) -> None:
        # The encoding may lack a character, the output's reader may have ended, or the disk may be
        # full. Such an error must not end the thread that reads a worker's output, because the
        # worker would then block.
        code = stream.encoding or "utf-8"
        with self._lock, contextlib.suppress(OSError, ValueError):
            text = "".join(f"{line}\n" for line in lines).encode(code, "backslashreplace")
            if stream in (sys.__stdout__, sys.__stderr__):
                # A script in this process may have printed half a line into Python's buffer. These
                # lines bypass the buffer, so that they do not continue that half line.
                while text:
                    text = text[os.write(stream.fileno(), text) :]
                return
            stream.write(text.decode(code))
            stream.flush()


@final
@dataclass
class Pump:
    """Moves a worker's output, line by line, to the screen or a log, and keeps the last lines.

    Attributes:
        screen: The screen, to which the lines go if there is no log.
        prefix: The text before each line on the screen.
        rank: The worker's number.
        log: The file for the lines, without a buffer; None for the screen.
        told: A function that is called with each report of the worker; None if the worker sends
            none. In the output, a report reaches from `supervisor.MARK` to the end of the line.
    """

    screen: Screen
    prefix: str
    rank: int
    log: FileIO | None = None
    told: Callable[[bytes], None] | None = None

    def __post_init__(self) -> None:
        self._last: deque[str] = deque(maxlen=LAST_LINES)
        self._threads: list[threading.Thread] = []

    def start(self, source: IO[bytes], stream: TextIO) -> None:
        """Starts to read one of the worker's outputs."""
        thread = threading.Thread(target=self._move, args=(source, stream), daemon=True)
        thread.start()
        self._threads.append(thread)

    def last_lines(self, deadline: float) -> tuple[str, ...]:
        """Returns the last lines; waits until `deadline` for the end of the output."""
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return tuple(self._last)

    def _move(self, source: IO[bytes], stream: TextIO) -> None:
        rest, shown_at = b"", time.monotonic()
        cut_off = b""
        while chunk := os.read(source.fileno(), 1 << 16):
            if self.told is not None:
                chunk, cut_off = self._without_reports(cut_off + chunk)
            *lines, rest = (rest + chunk).replace(b"\r\n", b"\n").split(b"\n")
            if lines:
                shown_at = time.monotonic()
            for line in lines:
                self._put(_as_drawn(line), stream)
            if b"\r" in rest:
                rest = b"\r" + _as_drawn(rest)
                if time.monotonic() - shown_at >= REDRAW_SECONDS:
                    self._put(rest[1:], stream)
                    shown_at = time.monotonic()
            elif len(rest) > _LONGEST_LINE:
                self._put(rest, stream)
                rest = b""
        if rest:
            self._put(_as_drawn(rest), stream)
        source.close()

    def _without_reports(self, chunk: bytes) -> tuple[bytes, bytes]:
        """Calls `told` with each report in a chunk of the output.

        Returns the chunk without its reports. If the chunk ends in the middle of a report, the
        second result is the beginning of that report; otherwise it is empty.
        """
        assert self.told is not None
        for report in _REPORT.findall(chunk):
            self.told(report)
        chunk = _REPORT.sub(b"", chunk)
        begin = chunk.rfind(supervisor.MARK[:1])
        is_cut_off = begin >= 0 and b"\n" not in chunk[begin:]
        return (chunk[:begin], chunk[begin:]) if is_cut_off else (chunk, b"")

    def _put(self, line: bytes, stream: TextIO) -> None:
        text = line.decode(errors="replace")
        self._last.append(text)
        if self.log is None:
            self.screen.write(self.prefix, text, stream, self.rank)
            return
        with contextlib.suppress(OSError, ValueError):  # the disk is full, or the file is closed
            self.log.write(f"{text}\n".encode())


def _as_drawn(line: bytes) -> bytes:
    """Returns the last state of a line that was redrawn, such as a progress bar."""
    drawn = [text.replace(b"\b", b"") for text in line.split(b"\r")]
    return next((text for text in reversed(drawn) if text), b"")


@final
@dataclass(frozen=True)
class Exited:
    """The event that a worker has ended."""

    rank: int


@final
@dataclass(frozen=True)
class Signalled:
    """The event that the launcher got a signal to stop the job."""

    number: int


@final
@dataclass(frozen=True)
class Waiting:
    """The event that waiting workers can be added, because the job has just saved a backup."""

    attempt: int


Event = Exited | Signalled | Waiting
Events = queue.SimpleQueue[Event]


@final
@dataclass(frozen=True)
class Start:
    """What `Worker` needs to start a worker.

    Attributes:
        rank: The worker's number.
        name: The prefix of the lines that the worker prints.
        command: The command that starts the worker's supervisor.
        orders: The orders that the supervisor reads, as JSON, from its standard input.
        log: The file for the worker's output; None for the screen.
        told: A function that is called with each report in the output; None if there are no
            reports.
        connection: The connection to the worker's machine if it has joined by ``kerasdist join``;
            otherwise None. The process of `command` inherits the connection.
    """

    rank: int
    name: str
    command: Sequence[str]
    orders: supervisor.Orders = field(repr=False)
    log: Path | None = None
    told: Callable[[bytes], None] | None = None
    connection: socket.socket | None = None


class Held(Protocol):
    """The interface by which an `Attempt` uses its workers.

    The package `kerasdist_ray` implements it for workers that Ray has started.
    """

    @property
    def rank(self) -> int:
        """The worker's number."""
        ...

    @property
    def running(self) -> bool:
        """Whether the worker has not ended yet."""
        ...

    @property
    def exit_code(self) -> int:
        """The exit code of a worker that has ended; 128 + n if signal n ended it."""
        ...

    def stop(self, number: int) -> None:
        """Passes a signal on to the worker."""

    def kill(self) -> None:
        """Ends the worker at once."""

    def kill_supervisor(self) -> None:
        """Ends the worker's supervisor. Called if the worker still runs after `kill`."""

    def ending(self, deadline: float) -> WorkerExit:
        """Returns how the worker has ended; waits for its output until `deadline`."""
        ...


@final
class Worker:
    """A worker that the launcher has started, together with its supervisor."""

    def __init__(self, start: Start, screen: Screen, events: Events) -> None:
        self.rank = start.rank
        self._began = time.monotonic()
        self._ended = self._began
        self._stopped = self._killed = False
        self._log = start.log and start.log.open("wb", buffering=0)
        self._pump = Pump(screen, f"[{start.name}]", start.rank, self._log, start.told)
        own = start.connection
        self._process = subprocess.Popen(
            start.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if start.log is None else subprocess.STDOUT,
            # Ctrl-C shall reach only the launcher, which passes the signal on to its workers.
            start_new_session=True,
            pass_fds=start.orders["inherited"] if own is None else [own.fileno()],
        )
        if own is not None:
            own.close()
        self._order(json.dumps(start.orders))
        outputs = (self._process.stdout, sys.stdout), (self._process.stderr, sys.stderr)
        for source, stream in outputs:
            if source is not None:
                self._pump.start(source, stream)
        threading.Thread(target=self._wait, args=(events,), daemon=True).start()

    @property
    def running(self) -> bool:
        """Whether the worker has not ended yet."""
        return self._process.poll() is None

    @property
    def exit_code(self) -> int:
        """The exit code of a worker that has ended; 128 + n if signal n ended it."""
        code = self._process.wait()
        return 128 - code if code < 0 else code

    def stop(self, number: int) -> None:
        """Passes a signal on to the worker."""
        self._stopped = True
        self._order(f"signal {number}")

    def _order(self, line: str) -> None:
        """Writes a line to the supervisor's input: what to start, or a signal for the worker."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError, ValueError):
            self._process.stdin.write(f"{line}\n".encode())
            self._process.stdin.flush()

    def kill(self) -> None:
        """Tells the supervisor to end the worker at once; if that fails, use `kill_supervisor`."""
        self._stopped = self._killed = True
        self.stop(signal.SIGKILL)

    def let_go(self) -> None:
        """Closes this process's end of the pipe that is the supervisor's input.

        The supervisor ends the worker when the supervisor's input ends. The input ends only when
        every process that has a copy of this end has closed it. So a process that is forked from
        this one must call this method, too.
        """
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def kill_supervisor(self) -> None:
        """Kills the supervisor, or the ssh process that leads to it. Then the worker ends, too."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def ending(self, deadline: float) -> WorkerExit:
        """Returns how the worker has ended."""
        exit_code = self.exit_code
        lines = self._pump.last_lines(deadline)
        if self._log is not None:
            self._log.close()
        self.let_go()
        return WorkerExit(
            rank=self.rank,
            exit_code=exit_code,
            seconds=self._ended - self._began,
            stopped=self._stopped,
            killed=self._killed,
            last_lines=lines,
            joined=supervisor.APART not in lines,
        )

    def _wait(self, events: Events) -> None:
        self._process.wait()
        self._ended = time.monotonic()
        events.put(Exited(self.rank))


@final
class ThisProcess:
    """Represents this process, which is rank 0, as a worker of an attempt.

    Attributes:
        told_to_stop: Whether the attempt has told this process to stop.
    """

    rank = 0

    def __init__(self, events: Events) -> None:
        self._events = events
        self._began = time.monotonic()
        self._seconds = 0.0
        self._code: int | None = None
        self._lock = threading.Lock()
        self._killed = False
        self.told_to_stop = False

    @property
    def running(self) -> bool:
        """Whether this process has not ended yet."""
        return self._code is None

    @property
    def exit_code(self) -> int:
        """The exit code of this process; 0 if the code is not known yet."""
        return self._code or 0

    def end(self, code: int) -> None:
        """Records that this process ends, with the exit code `code`."""
        with self._lock:
            if self._code is not None:
                return
            self._code, self._seconds = code, time.monotonic() - self._began
        self._events.put(Exited(self.rank))

    def stop(self, number: int) -> None:
        """Sends a signal to this process, or records its end if it has no handler for the signal.

        SIGINT is not sent, because the script has already got it.
        """
        if number == signal.SIGINT:
            return
        self.told_to_stop = True
        if signal.getsignal(number) is signal.SIG_DFL:
            self.end(128 + number)
        else:
            os.kill(os.getpid(), number)

    def kill(self) -> None:
        """Records that this process is to end; `Ranks` ends it after all other workers."""
        self.told_to_stop = self._killed = True
        self.end(128 + signal.SIGKILL)

    def kill_supervisor(self) -> None:
        """Does nothing, because this process has no supervisor."""

    def ending(self, deadline: float) -> WorkerExit:
        """Returns how this process ends."""
        return WorkerExit(0, self.exit_code, self._seconds, self.told_to_stop, self._killed, ())
