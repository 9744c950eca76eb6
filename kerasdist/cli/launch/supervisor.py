"""A worker's supervisor: a process between worker and launcher, on the worker's machine.

No worker outlives its launcher. The launcher holds the other end of the supervisor's standard
input, through ssh if the worker is on another machine. The first input line has the supervisor's
`Orders` as JSON. Orders are not passed as arguments, because every user of a machine can see the
arguments of all processes. For a line such as ``signal 15`` the supervisor sends the worker this
signal. If the input ends, the launcher has ended or its connection is lost, for whatever reason;
then the supervisor ends the worker too.

The worker leads a process group. When the worker ends, the supervisor ends all processes that are
left in the group. Signals go only to the worker itself. A SIGTERM to the group would also end the
processes of a data loader, and then the worker would fail before it has saved a backup.

For a worker on a machine that has joined the job, there is no ssh process. Instead the launcher
runs this file with one argument: the file descriptor of a connection to that machine. The worker's
supervisor is at the other end of the connection (`stand_in`).

The supervisor ends a worker that has been stopped (by SIGSTOP) for longer than the other workers
wait for its heartbeat. In a job of one worker, or before a worker has joined its job, no other
process would notice that the worker is stopped.

In an elastic job the worker may be forked by a process that has already imported the frameworks
(`kerasdist.cli.launch.elastic.warm`). Then a fork of that process, and not the supervisor, is the
worker's parent. This fork waits for the worker, and ends the worker's group.

On the launcher's machine this file is run by its path, so it imports only the standard library. On
another machine it is run as a module, and may also import the package.
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
from typing import IO, NoReturn, TypedDict

_PR_SET_PDEATHSIG = 1
# This file is run by its path and cannot import the package, so it repeats these names.
_JOINED_FILE = "KERASDIST_JOINED_FILE"  # as in kerasdist.job.launcher
_STATUS_FD = "KERASDIST_STATUS_FD"  # as in kerasdist.job.launcher
_FILES = _STATUS_FD, "KERASDIST_COORDINATOR_FD"  # as in kerasdist.job.listening

MARK = b"\x1ekerasdist "
"""In the output of a worker, these bytes precede a report of the worker to the launcher."""

ENDED = b"\x04"
"""Precedes a worker's exit code, which is the last byte that a joined machine sends."""

LOST = 255
"""The exit code of a worker whose machine is lost or unreachable; ssh uses the same exit code."""

APART = "kerasdist: this worker has ended without joining the job"
"""If a worker ends well without joining the job, its supervisor prints this as the last line."""

TOO_EARLY = (
    "kerasdist: this process has ended before it made the strategy for which worker 0 has started "
    "this script again. Make the strategy in every process, at the same place: no condition that "
    "differs between processes may come before it"
)
"""The supervisor prints this instead of `APART` if the worker must join (`Orders.must_join`)."""


class Orders(TypedDict):
    """The orders for a supervisor.

    Attributes:
        command: The worker's command.
        variables: Environment variables of the worker, in addition to those of the supervisor.
        seconds_to_stop: How long the worker has from SIGTERM to SIGKILL.
        heartbeat: How many seconds the worker may be stopped by SIGSTOP, as in
            `kerasdist.job.protocol.Timeouts`.
        local_workers: How many workers the worker's machine has.
        gpus_of: The worker's number among the workers of its machine, if the supervisor must choose
            the worker's part of the GPUs; otherwise None.
        inherited: The file descriptors that the worker inherits.
        sends_reports: Whether the supervisor writes the worker's reports between its output lines.
        must_join: Whether it is a failure if the worker ends well without joining the job.
        warm: The name of the socket of the warm process that may fork the worker; "" if none may.
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
    """An order to a warm process to fork a worker.

    Attributes:
        environment: The worker's environment variables.
        files: The names of those variables whose values are file descriptors.
    """

    environment: dict[str, str]
    files: list[str]


def follow_into_death() -> None:
    """Makes the kernel end this process, a worker, when its parent ends; works only on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Forked:
    """A worker that a warm process (`kerasdist.cli.launch.elastic.warm`) has forked.

    Raises:
        OSError: If there is no warm process of this name, or if it belongs to another user.
        ValueError: If the warm process cannot fork this worker.
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

    def send_signal(self, number: int) -> None:
        """Sends the worker a signal."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._process, number)

    def wait(self, timeout: float | None = None) -> int:
        """Returns the exit code of the worker, in the form of `subprocess.Popen.wait`."""
        if not select.select([self._connection], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired("worker", timeout or 0.0)
        # Without an answer, the worker's parent was killed, and the kernel has killed the worker.
        return int(self._answers.readline() or -signal.SIGKILL)


def peer_user(connection: socket.socket) -> int:
    """Returns the number of the user at the other end of a local connection."""
    return struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1]


Worker = subprocess.Popen[bytes] | Forked


def end(worker: Worker, grace: float) -> NoReturn:
    """Ends a worker whose launcher has ended, and then this supervisor."""
    worker.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        worker.wait(grace)
    end_group(worker)
    os._exit(128 + signal.SIGKILL)


def end_group(worker: Worker) -> None:
    """Ends the worker's process group, which has the same number as the worker."""
    if isinstance(worker, Forked):
        return  # the worker's parent, a fork of the warm process, ends the group
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(worker.pid, signal.SIGKILL)


def listen(orders: IO[bytes], worker: Worker, grace: float) -> NoReturn:
    """Passes the launcher's signals on to the worker; if the launcher ends, ends the worker."""
    for line in orders:
        word, _, number = line.decode().partition(" ")
        if word == "signal":
            worker.send_signal(int(number))
    end(worker, grace)


def end_if_stopped(worker: Worker, heartbeat: float) -> None:
    """Ends a worker that stays stopped by SIGSTOP while this process runs; works only on Linux.

    The limit is `heartbeat` seconds plus the time of two more checks of the worker's state. So the
    other workers can report the worker as lost before it is ended here.
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
        "(KERASDIST_HEARTBEAT_TIMEOUT), so it is ended\n"
    )
    sys.stderr.flush()
    worker.send_signal(signal.SIGKILL)


def relay(reports: int) -> None:
    """Writes the worker's reports, each after `MARK`, between the lines of the worker's output."""
    with os.fdopen(reports, "rb") as lines:
        for line in lines:
            os.write(sys.stdout.fileno(), MARK + line)


def stand_in(connection: socket.socket) -> int:
    """Passes orders to a supervisor on a joined machine, and passes back the supervisor's output.

    Returns the worker's exit code.
    """

    def order() -> None:
        with contextlib.suppress(OSError):
            while data := os.read(sys.stdin.fileno(), 1 << 16):
                connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)  # the launcher has ended

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


def cores() -> int:
    """Returns how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def main() -> int:
    """Supervises a worker; returns the worker's exit code, 128 + n if signal n ended the worker."""
    # The supervisor ignores these signals, because the launcher decides what they mean.
    # A function is set, and not SIG_IGN, because the worker would inherit SIG_IGN.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
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
            preexec_fn=follow_into_death,  # noqa: PLW1509 - there is no other thread yet
        )
    except OSError as error:
        sys.stderr.write(f"kerasdist: cannot start {command[0]!r}: {error.strerror}\n")
        return 127
    # One of these descriptors may be the coordinator's listening socket. Only the worker may keep
    # that socket open, so that the port is free when the worker has ended.
    for number in inherited:
        os.close(number)
    listening = sys.stdin.buffer, worker, orders["seconds_to_stop"]
    threading.Thread(target=listen, args=listening, daemon=True).start()
    watching = worker, orders["heartbeat"]
    threading.Thread(target=end_if_stopped, args=watching, daemon=True).start()
    relaying = threading.Thread(target=relay, args=(reports,), daemon=True)
    if reports is not None:
        relaying.start()
    if isinstance(worker, subprocess.Popen):
        # The group is ended before `wait`, because after `wait` another group may get its number.
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)
        end_group(worker)
    code = worker.wait()
    if reports is not None:
        relaying.join(1)  # until the last reports are written
    has_joined = joined.exists()
    joined.unlink(missing_ok=True)
    if code == 0 and not has_joined:
        sys.stderr.write(f"{TOO_EARLY if orders['must_join'] else APART}\n")
        return int(orders["must_join"])
    return 128 - code if code < 0 else code


if __name__ == "__main__":
    code = main() if len(sys.argv) == 1 else stand_in(socket.socket(fileno=int(sys.argv[1])))
    sys.stderr.flush()
    # sys.exit would fail, because the thread that waits for orders holds a lock of standard input.
    # Python treats that as a fatal error at the end of the interpreter.
    os._exit(code)
