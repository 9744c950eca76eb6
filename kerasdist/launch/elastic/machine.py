"""``kerasdist join``: a machine that offers itself to a job, and starts what it is told to.

It has a connection to the launcher for each of its workers, and passes what comes to a supervisor,
whose output goes back: the connection is what ssh is for a machine that is listed. As a worker ends
the machine takes a seat for the next one, and only then tells how the worker has ended: so the
launcher knows of the seat when it starts the job again. If this process ends, its supervisors do.
"""

from __future__ import annotations

import contextlib
import queue
import secrets
import socket
import subprocess
import sys
import threading
from typing import final

from kerasdist.errors import ClusterError, JobError
from kerasdist.job import handshake, protocol
from kerasdist.job.secret import SECRET, Credentials, credentials
from kerasdist.launch import supervisor
from kerasdist.launch.elastic.seats import JOB_ENDED, OF_JOINERS, keep_alive

_CHUNK = 1 << 16
_DRAIN_SECONDS = 5.0


@final
class Machine:
    """This machine, as one that joins a job.

    Args:
        host: The machine of the job's launcher.
        port: The port on which it listens.
        workers: How many workers this machine offers.
    """

    def __init__(self, host: str, port: int, workers: int) -> None:
        secret = credentials().secret
        if secret is None:
            raise ClusterError(
                f"Expected {SECRET} or {SECRET}_FILE with the secret of the job. Received: none of "
                "them. Set what the launcher of the job has."
            )
        self._address = host, port
        self._credentials = Credentials(secret, OF_JOINERS)
        self._count = workers
        self._name = secrets.token_hex(8)
        self._ends: queue.SimpleQueue[int | Exception] = queue.SimpleQueue()

    def serve(self) -> int:
        """Runs workers until the job ends, and returns its exit code.

        Raises:
            ClusterError: If the launcher is not there, or not any more.
        """
        for number in range(self._count):
            threading.Thread(target=self._hold, args=(number,), daemon=True).start()
        end = self._ends.get()
        if isinstance(end, Exception):
            raise ClusterError(
                f"Expected the launcher of a job at {self._address[0]}:{self._address[1]}. "
                f"Received: {end}. Look whether the job goes on, and was started with --join-port."
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
        """Returns a connection on which the launcher starts a worker when it wants to."""
        connection = handshake.introduced(*self._address, self._credentials, handshake.SECONDS)
        keep_alive(connection)
        told = {"machine": self._name, "number": number, "count": self._count}
        connection.sendall(protocol.packed(told))
        protocol.receive(connection, handshake.MAX_BYTES)
        connection.settimeout(None)
        return connection

    def _work(self, number: int, connection: socket.socket, first: bytes) -> socket.socket:
        """Runs a worker; returns the connection on which the launcher starts the next one."""
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
        with contextlib.suppress(OSError):  # the launcher did not wait for it
            connection.sendall(supervisor.ENDED + bytes([128 - code if code < 0 else code]))
            connection.shutdown(socket.SHUT_WR)
            passing.join(_DRAIN_SECONDS)  # unread bytes would reset the connection
        connection.close()
        return seat


def _pass_on(data: bytes, connection: socket.socket, running: subprocess.Popen[bytes]) -> None:
    """Passes what the launcher says on to a supervisor; the end as well."""
    assert running.stdin is not None
    with contextlib.suppress(OSError), running.stdin:
        while data:
            with contextlib.suppress(BrokenPipeError):  # it has ended
                running.stdin.write(data)
                running.stdin.flush()
            data = connection.recv(_CHUNK)
