"""A proxy for JAX's coordinator, to which connections stay open when the chief dies.

JAX's coordination client polls the chief's service over one connection, and aborts the process as
soon as the connection closes: before kerasdist can say which worker was lost, and with a
stack of C++ in place of an error (https://docs.jax.dev/en/latest/fault_tolerance.html: "if process
0 fails, every process will fail"). Its callback for this case cannot be used: jaxlib fails to hand
a status to Python, with ``std::bad_cast`` (seen with 0.10.2). So the client talks to a relay in its
own process. When the chief dies, the relay keeps the client's connection open, and kerasdist's own
monitor reports the loss. Only the small messages of JAX's coordination pass through the relay; the
collectives have connections of their own.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from typing import final

_CHUNK_BYTES = 1 << 16
_RETRY_SECONDS = 0.1


@final
class Relay:
    """Passes bytes between this process and a server; keeps this process's connections open.

    Attributes:
        address: ``host:port`` to connect to in place of the server's.
    """

    def __init__(self, server: str, patience: float) -> None:
        """Starts to listen; tries for `patience` seconds to reach the server."""
        host, _, port = server.rpartition(":")
        self._server = host.strip("[]"), int(port)
        self._patience = patience
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        _start(self._listen)

    def close(self) -> None:
        """Stops accepting connections."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()

    def _listen(self) -> None:
        with contextlib.suppress(OSError):  # `close` was called
            while True:
                _start(self._serve, self._listener.accept()[0])

    def _serve(self, client: socket.socket) -> None:
        with client:
            server = self._connected()
            if server is None:
                return
            with server:
                # After the server has closed its connection, the client waits for an answer that
                # does not come, and `_pass_on` drops what the client sends.
                _start(_pass_on, server, client)
                _pass_on(client, server)
                with contextlib.suppress(OSError):
                    server.shutdown(socket.SHUT_RDWR)  # wakes the thread that receives

    def _connected(self) -> socket.socket | None:
        end = time.monotonic() + self._patience
        while time.monotonic() < end:
            with contextlib.suppress(OSError):
                connection = socket.create_connection(self._server, timeout=self._patience)
                connection.settimeout(None)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return connection
            time.sleep(_RETRY_SECONDS)
        return None


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    """Copies bytes from one socket to another until the source closes."""
    with contextlib.suppress(OSError):
        while data := source.recv(_CHUNK_BYTES):
            with contextlib.suppress(OSError):
                target.sendall(data)


def _start(function: Callable[..., None], *args: object) -> None:
    threading.Thread(target=function, args=args, name="kerasdist-relay", daemon=True).start()
