"""Lets machines join a running job: the code of ``kerasdist join``, and the launcher's part.

A machine that joins holds a connection to the launcher, called a seat, for each worker that it
offers. On a seat the machine proves that it knows the job's secret, and then waits for the orders
for a worker's supervisor. The machine passes these orders on to a supervisor, and passes the
supervisor's output back to the launcher. So a seat does the work that ssh does for a machine in
``--hosts``. When a worker ends, the machine first opens a seat for the next worker, and only then
reports how the worker has ended. So the launcher already has the new seat when it restarts the job.
If the process of ``kerasdist join`` ends, its supervisors end too.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import secrets
import socket
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Mapping
from typing import final

from kerasdist.cli.launch import supervisor
from kerasdist.cli.launch.placement import Slot
from kerasdist.cli.launch.spec import JobSpec
from kerasdist.cli.launch.worker import Screen
from kerasdist.cluster import addresses
from kerasdist.core.user_warnings import plural
from kerasdist.errors import ClusterError, JobError
from kerasdist.job import handshake, protocol
from kerasdist.job.handshake import SECRET, Credentials, credentials
from kerasdist.job.listening import BACKLOG

OF_JOINERS = "kerasdist join"
"""A joining machine uses this name in the handshake, because it does not know the job's name."""

JOB_ENDED = b"ended "
"""When the job ends, the launcher sends this and the job's exit code to machines that wait."""

_CHUNK = 1 << 16
_DRAIN_SECONDS = 5.0


@final
class Seats:
    """The launcher's seats: connections on which it can start workers on machines that joined.

    Args:
        spec: The description of the job, with the port to listen on.
        screen: The output for messages about machines that have joined.

    Raises:
        ClusterError: If the user has set no secret for the job, or the port is taken.
    """

    def __init__(self, spec: JobSpec, screen: Screen) -> None:
        proof = _proof_of(spec.variables)
        try:
            self._listener = socket.create_server(("", spec.join_port or 0), backlog=BACKLOG)
        except (OSError, OverflowError) as error:  # OverflowError: no port has this number
            raise ClusterError(
                f"Expected a free port for machines that join. Received: {spec.join_port}: {error}."
            ) from error
        self._screen = screen
        self._gate = handshake.Gate(proof, 1, "[kerasdist]")
        self._waiting: dict[Slot, socket.socket] = {}
        # By machine: the numbers of those of its workers for which it has ever opened a seat.
        self._offered = defaultdict[str, set[int]](set)
        self._lock = threading.Lock()
        loop = asyncio.new_event_loop()
        self._listening = asyncio.run_coroutine_threadsafe(self._listen(), loop)
        threading.Thread(target=loop.run_forever, daemon=True).start()
        address = addresses.join(socket.gethostname(), self._listener.getsockname()[1])
        screen.say(f"other machines join by: kerasdist join {address}")

    def waiting(self) -> list[Slot]:
        """Returns the seats on which a worker can be started.

        A machine opens its seats one by one. Before it has opened all of them, none is returned.
        """
        with self._lock:
            for slot in [one for one, held in self._waiting.items() if not _is_open(held)]:
                self._waiting.pop(slot).close()
            offered = self._offered
            return [one for one in self._waiting if len(offered[one.machine]) == one.local_workers]

    def take(self, slot: Slot) -> socket.socket:
        """Removes a seat from the waiting seats, and returns the seat's connection."""
        with self._lock:
            return self._waiting.pop(slot)

    def end(self, code: int) -> None:
        """Sends the job's exit code to all machines that wait, and lets no other machine join."""
        self._listening.cancel()
        with self._lock:
            for held in self._waiting.values():
                with contextlib.suppress(OSError):
                    held.sendall(JOB_ENDED + str(code).encode())
                held.close()
            self._waiting.clear()

    async def _listen(self) -> None:
        async with await asyncio.start_server(self._admit, sock=self._listener) as server:
            await server.serve_forever()

    async def _admit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if await self._gate.admits(reader, writer):
                async with asyncio.timeout(handshake.SECONDS):
                    told = await handshake.read(reader, handshake.MAX_BYTES)
                match told:
                    case {"machine": str(machine), "number": int(number), "count": int(count)}:
                        self._seat(writer, machine, number, count)
                    case _:
                        pass
        except (OSError, EOFError):
            pass  # the machine has left
        finally:
            writer.close()

    def _seat(self, writer: asyncio.StreamWriter, machine: str, number: int, count: int) -> None:
        connection: socket.socket = writer.get_extra_info("socket").dup()
        keep_alive(connection)
        host = connection.getpeername()[0]
        # The seat is added before the machine gets the answer "seated". After this answer the
        # machine reports the end of its previous worker, and the launcher looks for waiting seats.
        with self._lock:
            self._waiting[Slot(host, 0, number, count, machine=machine)] = connection
            offered = self._offered[machine]
            is_new = number not in offered
            offered.add(number)
            writer.write(protocol.packed({"type": "seated"}))
            writer.close()
            # asyncio has made this socket non-blocking for the writer, which is closed now.
            connection.setblocking(True)
        if is_new and len(offered) == count:
            said = f"{host} has joined with {plural(count, 'worker')}"
            self._screen.say(f"{said}, which the job adds at its next backup, if the job has room")


def _proof_of(environ: Mapping[str, str]) -> Credentials:
    """Returns the credentials by which a joining machine and the launcher trust each other.

    The user must have set the same secret on both machines.
    """
    secret = credentials(environ).secret
    if secret is None:
        raise ClusterError(
            f"Expected {SECRET} or {SECRET}_FILE, by which a machine proves that it may join. "
            "Received: neither of them. Set the same secret on this machine and on the other."
        )
    return Credentials(secret, OF_JOINERS)


def keep_alive(connection: socket.socket) -> None:
    """Lets the kernel end a connection whose other end is silent for half a minute, as ssh does."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 30000}
    for name, value in options.items():
        if hasattr(socket, name):  # systems may lack these options
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _is_open(connection: socket.socket) -> bool:
    """Returns whether a waiting seat is open: the machine has neither closed it nor sent data."""
    try:
        connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


@final
class Machine:
    """This machine, which joins a job and runs some of the job's workers.

    Args:
        host: The machine of the job's launcher.
        port: The port on which the launcher listens.
        workers: How many workers this machine offers.
    """

    def __init__(self, host: str, port: int, workers: int) -> None:
        self._address = host, port
        self._credentials = _proof_of(os.environ)
        self._count = workers
        self._name = secrets.token_hex(8)
        self._ends: queue.SimpleQueue[int | Exception] = queue.SimpleQueue()

    def serve(self) -> int:
        """Runs workers until the job ends, and returns the job's exit code.

        Raises:
            ClusterError: If the launcher cannot be reached, or is lost later.
        """
        for number in range(self._count):
            threading.Thread(target=self._hold, args=(number,), daemon=True).start()
        end = self._ends.get()
        if isinstance(end, Exception):
            raise ClusterError(
                f"Expected the launcher of a job at {self._address[0]}:{self._address[1]}. "
                f"Received: {end}. Check that the job runs, and was started with --join-port."
            ) from end
        return end

    def _hold(self, number: int) -> None:
        try:
            connection = self._seated(number)
            while not (first := connection.recv(_CHUNK)).startswith(JOB_ENDED):
                if not first:
                    raise ConnectionError("the connection was closed")
                connection = self._work(number, connection, first)
            self._ends.put(int(first.removeprefix(JOB_ENDED)))
        except (OSError, ValueError, JobError) as error:
            self._ends.put(error)

    def _seated(self, number: int) -> socket.socket:
        """Opens a seat for worker `number` of this machine, and returns the seat's connection."""
        connection = handshake.introduced(*self._address, self._credentials, handshake.SECONDS)
        keep_alive(connection)
        told = {"machine": self._name, "number": number, "count": self._count}
        connection.sendall(protocol.packed(told))
        protocol.receive(connection, handshake.MAX_BYTES)
        connection.settimeout(None)
        return connection

    def _work(self, number: int, connection: socket.socket, first: bytes) -> socket.socket:
        """Runs one worker, and returns the connection of the seat for the next worker.

        The bytes `first` are the beginning of the orders for the worker's supervisor.
        """
        running = subprocess.Popen(
            [sys.executable, "-P", "-m", supervisor.__name__],
            stdin=subprocess.PIPE,
            stdout=connection.fileno(),
            stderr=subprocess.STDOUT,
        )
        passing = threading.Thread(target=_pass_on, args=(first, connection, running), daemon=True)
        passing.start()
        code = running.wait()
        seat = self._seated(number)
        with contextlib.suppress(OSError):  # the launcher may have closed the connection
            connection.sendall(supervisor.ENDED + bytes([128 - code if code < 0 else code]))
            connection.shutdown(socket.SHUT_WR)
            # If `connection` were closed with unread bytes, TCP would reset it, and the launcher
            # might lose the exit code. So the thread `passing` first reads all that is left.
            passing.join(_DRAIN_SECONDS)
        connection.close()
        return seat


def _pass_on(data: bytes, connection: socket.socket, running: subprocess.Popen[bytes]) -> None:
    """Writes `data`, and all that the launcher sends after it, to a supervisor's input.

    When the connection ends, this function closes the input. Then the supervisor ends its worker if
    the worker still runs.
    """
    assert running.stdin is not None
    with contextlib.suppress(OSError), running.stdin:
        while data:
            with contextlib.suppress(BrokenPipeError):  # the supervisor has ended
                running.stdin.write(data)
                running.stdin.flush()
            data = connection.recv(_CHUNK)
