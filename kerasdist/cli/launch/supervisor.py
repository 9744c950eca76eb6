"""A worker's supervisor: the process between it and the launcher, on the worker's machine.

It leaves no orphans. The launcher holds the other end of its standard input, through ssh where the
worker is on another machine. The first line has its `Orders`, as JSON: every user of a machine sees
the arguments of all processes. It passes a line ``signal 15`` on to the worker. The end of the
input means that the launcher is gone, whatever ended it (SIGKILL, a lost connection): it ends the
worker too.

The worker leads a process group, and what it leaves behind there is ended with it. Signals go to
the worker alone: a data loader's processes that got SIGTERM would take the worker down before it
has backed up.

For a worker on a machine that has joined, this file run with the number of a connection takes the
place of ssh: the supervisor is at the other end.

It ends a worker that is stopped for longer than the others wait for a sign of life. Nobody else
would notice it of a worker that is alone, or that has not joined the others yet.

In an elastic job the worker may be a fork of a process that has imported the frameworks
(`kerasdist.cli.launch.elastic.warm`); the worker's parent then does for it what only a parent can.

This file is run by its path, and imports nothing but the standard library; on another machine it is
run as a module.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import IO, NoReturn, TypedDict

_PR_SET_PDEATHSIG = 1
_JOINED_FILE = "KERASDIST_JOINED_FILE"  # as in kerasdist.job.launcher
_STATUS_FD = "KERASDIST_STATUS_FD"  # as in kerasdist.job.launcher
_FILES = _STATUS_FD, "KERASDIST_COORDINATOR_FD"  # as in kerasdist.job.listening

MARK = b"\x1ekerasdist "
"""Stands before a worker's report, where it comes by the output."""

ENDED = b"\x04"
"""Stands before a worker's exit code, a byte, at the end of what a joined machine sends."""

LOST = 255
"""How it ends if the machine is lost, as ssh does."""

APART = "kerasdist: this worker has ended without joining the job"
"""A supervisor's last line, where a worker ended well and has not joined the others."""

TOO_EARLY = (
    "kerasdist: this process has ended before it made the strategy for which worker 0 has started "
    "this script again. Make the strategy in every process, at the same place: no condition that "
    "differs between processes may come before it"
)
"""A supervisor's last line, where it was told that such a worker is a failure."""


class Orders(TypedDict):
    """What a supervisor is to do.

    Attributes:
        command: The worker's command.
        variables: What its environment has beyond the supervisor's.
        seconds_to_stop: How long it has from SIGTERM to SIGKILL.
        heartbeat: How long it may be stopped (`kerasdist.job.protocol.Timeouts`).
        local_workers: How many workers this machine has.
        gpus_of: Which of them it is, where the GPUs are divided here; None: they are not.
        inherited: The files that it inherits.
        sends_reports: Whether its reports are passed on by the output.
        must_join: Whether it is a failure to end well without joining the job.
        warm: The name of the process that may fork the worker; empty: none.
    """

    command: list[str]
    variables: dict[str, str]
    seconds_to_stop: float
    heartbeat: float
    local_workers: int
    gpus_of: int | None
    inherited: list[int]
    sends_reports: bool
    must_join: bool
    warm: str


class Order(TypedDict):
    """What a warm process is to fork: its environment, and the variables that name files."""

    environment: dict[str, str]
    files: list[str]


def follow_into_death() -> None:
    """Makes the kernel end the worker if this supervisor is killed; only Linux can."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Forked:
    """A worker that a warm process (`kerasdist.cli.launch.elastic.warm`) has forked.

    Raises:
        OSError: If there is no such process, or it is another user's.
        ValueError: If it cannot fork this worker.
    """

    def __init__(self, name: str, environment: dict[str, str], inherited: list[int]) -> None:
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(f"\0{name}")
        if peer_user(self._connection) != os.getuid():
            raise PermissionError
        files = [name for name in _FILES if environment.get(name, "") in map(str, inherited)]
        order: Order = {"environment": environment, "files": files}
        numbers = [int(environment[name]) for name in files]
        socket.send_fds(self._connection, [b"\0"], [1, 2, *numbers])
        self._connection.sendall(json.dumps(order).encode() + b"\n")
        self._answers = self._connection.makefile("rb")
        self.pid = int(self._answers.readline())
        self._process = os.pidfd_open(self.pid)

    def terminate(self) -> None:
        """Sends the worker SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def send_signal(self, number: int) -> None:
        """Sends the worker a signal."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._process, number)

    def wait(self, timeout: float | None = None) -> int:
        """Returns how it has ended, as `subprocess.Popen` does."""
        if not select.select([self._connection], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired("worker", timeout or 0.0)
        return int(self._answers.readline() or -signal.SIGKILL)  # with its parent


def peer_user(connection: socket.socket) -> int:
    """Returns the number of the user on the other side of a connection on this machine."""
    return struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1]


Worker = subprocess.Popen[bytes] | Forked


def end(worker: Worker, grace: float) -> NoReturn:
    """Ends a worker whose launcher is gone, and this supervisor."""
    worker.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        worker.wait(grace)
    end_group(worker)
    os._exit(128 + signal.SIGKILL)


def end_group(worker: Worker) -> None:
    """Ends the worker's process group, which carries the worker's number."""
    if isinstance(worker, Forked):
        return  # its parent does, as soon as this process has ended
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(worker.pid, signal.SIGKILL)


def listen(orders: IO[bytes], worker: Worker, grace: float) -> NoReturn:
    """Passes signals on until the launcher is gone, and then ends the worker."""
    for line in orders:
        word, _, number = line.decode().partition(" ")
        if word == "signal":
            worker.send_signal(int(number))
    end(worker, grace)


def end_if_stopped(worker: Worker, heartbeat: float) -> None:
    """Ends a worker that is stopped while this process runs; only Linux tells.

    The other workers, if it has any, have two beats more to name it.
    """
    beat = min(1.0, heartbeat / 4)
    left = limit = heartbeat + 2 * beat
    while left > 0:
        time.sleep(beat)
        try:
            state = Path(f"/proc/{worker.pid}/stat").read_bytes().rpartition(b") ")[2][:1]
        except OSError:
            return
        left = left - beat if state == b"T" else limit
    sys.stderr.write(
        f"kerasdist: this worker, process {worker.pid}, was stopped for {heartbeat:g} s "
        "(KERASDIST_HEARTBEAT_TIMEOUT): it is ended\n"
    )
    sys.stderr.flush()
    worker.send_signal(signal.SIGKILL)


def relay(reports: int) -> None:
    """Writes the worker's reports, with a mark before each, between its lines."""
    with os.fdopen(reports, "rb") as lines:
        for line in lines:
            os.write(sys.stdout.fileno(), MARK + line)


def stand_in(connection: socket.socket) -> int:
    """Passes orders on to a machine that has joined, and output back; returns the exit code."""

    def order() -> None:
        with contextlib.suppress(OSError):
            while data := os.read(sys.stdin.fileno(), 1 << 16):
                connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)  # the launcher is gone

    threading.Thread(target=order, daemon=True).start()
    text = b""
    with contextlib.suppress(ConnectionError, TimeoutError):
        while chunk := connection.recv(1 << 16):
            text += chunk
            begin = text.rfind(ENDED, max(0, len(text) - 2))
            end = len(text) if begin < 0 else begin
            while end:
                written = os.write(sys.stdout.fileno(), text[:end])
                text, end = text[written:], end - written
    return text[1] if len(text) == 2 else LOST


def pass_over(number: int, frame: FrameType | None) -> None:
    """Ignores a signal."""


def cores() -> int:
    """Returns how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def main() -> int:
    """Runs a command as its supervisor; returns its exit code, 128 + n if signal n ended it."""
    # These signals are meant for the launcher, which decides. A function
    # and not SIG_IGN, which the worker would inherit.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, pass_over)
    orders: Orders = json.loads(sys.stdin.buffer.readline())
    command, inherited = orders["command"], orders["inherited"]
    os.environ.update(orders["variables"])
    if orders["gpus_of"] is not None:
        from kerasdist.core.gpus import divide

        os.environ.update(divide(os.environ, orders["local_workers"])[orders["gpus_of"]])
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores() // orders["local_workers"])))
    temporary = os.environ.get("TMPDIR") or "/tmp"
    joined = Path(temporary, f"kerasdist-joined-{os.getpid()}-{os.urandom(8).hex()}")
    reports = None
    if orders["sends_reports"]:
        reports, to_worker = os.pipe()
        os.environ[_STATUS_FD] = str(to_worker)
        inherited.append(to_worker)
    os.environ[_JOINED_FILE] = str(joined)
    worker: Worker | None = None
    if orders["warm"]:
        with contextlib.suppress(OSError, ValueError):
            worker = Forked(orders["warm"], dict(os.environ), inherited)
    try:
        worker = worker or subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            process_group=0,
            pass_fds=inherited,
            preexec_fn=follow_into_death,  # noqa: PLW1509 - there is no thread here yet
        )
    except OSError as error:
        sys.stderr.write(f"kerasdist: cannot start {command[0]!r}: {error.strerror}\n")
        return 127
    for number in inherited:  # the worker's alone: the port must not stay open without it
        os.close(number)
    listening = sys.stdin.buffer, worker, orders["seconds_to_stop"]
    threading.Thread(target=listen, args=listening, daemon=True).start()
    watching = worker, orders["heartbeat"]
    threading.Thread(target=end_if_stopped, args=watching, daemon=True).start()
    relaying = threading.Thread(target=relay, args=(reports,), daemon=True)
    if reports is not None:
        relaying.start()
    if isinstance(worker, subprocess.Popen):
        # Its process number is its group's, and is not given to another process before the wait.
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)
        end_group(worker)
    code = worker.wait()
    if reports is not None:
        relaying.join(1)  # the last ones
    has_joined = joined.exists()
    joined.unlink(missing_ok=True)
    if code == 0 and not has_joined:
        sys.stderr.write(f"{TOO_EARLY if orders['must_join'] else APART}\n")
        return int(orders["must_join"])
    return 128 - code if code < 0 else code


if __name__ == "__main__":
    code = main() if len(sys.argv) == 1 else stand_in(socket.socket(fileno=int(sys.argv[1])))
    sys.stderr.flush()
    # Not sys.exit: at the end of the interpreter the thread that waits for orders holds a lock of
    # the standard input, and that would be a fatal error.
    os._exit(code)
