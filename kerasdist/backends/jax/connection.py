"""Connects the workers' JAX processes by `jax.distributed`, with kerasdist's time-outs.

JAX's coordination client polls the chief's service over one connection. If that connection closes,
the client aborts the process at once, before kerasdist can report which worker was lost, and prints
a C++ stack instead of an error (https://docs.jax.dev/en/latest/fault_tolerance.html: "if
process 0 fails, every process will fail"). The client has a callback for this case, but jaxlib
cannot pass the callback's argument, an error status, to Python, and fails with ``std::bad_cast``
(seen with 0.10.2). So the client talks to a relay, which runs in the client's process. When the
chief dies, the relay keeps the client's connection open, and kerasdist's own monitor reports the
loss. Only the small messages of JAX's coordination pass through the relay; collectives have their
own connections.
"""

from __future__ import annotations

import contextlib
import math
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, final

import jax

from kerasdist.backends.base.checks import started_too_early
from kerasdist.errors import JobError
from kerasdist.job import listening
from kerasdist.job.job import Job
from kerasdist.job.monitor import GRACE_SECONDS

# JAX's time-out for a lost worker, as a multiple of kerasdist's own. JAX's is longer, so that
# kerasdist notices the loss first and names the lost worker. JAX itself would end all processes
# without saying which worker was lost.
_LATER = 20

# If an error of JAX 0.10 contains this text, JAX had already started before `connect` was called.
_TOO_LATE = "must be called before any JAX calls"

_CHUNK_BYTES = 1 << 16
_RETRY_SECONDS = 0.1


def connect(job: Job, gpus: Sequence[int] | None = None) -> None:
    """Starts JAX's coordination between the workers. All workers must call this function.

    Args:
        job: The job of this process.
        gpus: The numbers of the GPUs that JAX shall use. Empty: no GPU. None: all GPUs.
    """
    config: Any = jax.config  # Any: JAX adds the settings to the config's class at run time
    if gpus is not None and not gpus and not config.jax_platforms:
        jax.config.update("jax_platforms", "cpu")
    # JAX's preemption service would catch SIGTERM, by which schedulers and users end a process.
    jax.config.update("jax_enable_preemption_service", False)
    service = job.chief_address
    way = service
    interfaces = "127.0.0.1" if job.is_on_one_machine else "[::]"
    if job.is_chief:
        # This call reserves the port of the chief's service. If another program took the port, JAX
        # would end the process without an error.
        job.own_port()
    else:
        way = Relay(service, job.timeouts.join).address
    try:
        jax.distributed.initialize(
            coordinator_address=way,
            num_processes=job.num_workers,
            process_id=job.rank,
            local_device_ids=gpus or None,
            # kerasdist has already found the workers
            cluster_detection_method="deactivate",
            coordinator_bind_address=f"{interfaces}:{service.rpartition(':')[2]}",
            initialization_timeout=math.ceil(job.timeouts.join),
            heartbeat_timeout_seconds=math.ceil(_LATER * job.timeouts.heartbeat),
            # A failed worker has this much time to end by itself before JAX aborts it.
            shutdown_timeout_seconds=math.ceil(job.timeouts.heartbeat + GRACE_SECONDS),
        )
    except RuntimeError as error:
        if _TOO_LATE in str(error):
            # JAX's own traceback is left out, because it says no more than this error.
            raise started_too_early(job, "JAX") from None
        raise JobError(
            f"{job.who} Expected to connect JAX with the chief at {service}. Received: "
            f"{str(error).rstrip('.')}. Make the chief's port reachable from this machine."
        ) from error
    job.at_leave(jax.distributed.shutdown)
    with listening.waiting_their_turn():
        jax.local_devices()  # This call starts JAX, and with it the threads of Gloo.


def check_way_back(job: Job) -> None:
    """Raises a JobError if other machines cannot reach this machine by its name.

    JAX's collectives on CPUs connect to that name.
    """
    address = listening.misleads(job.other_addresses)
    if address is not None:
        name = socket.gethostname()
        raise JobError(
            f"{job.who} Expected the name of this machine to be an address at which other machines "
            f"reach it: JAX sums there, on CPUs. Received: {name!r}, which is "
            f"{socket.gethostbyname(name)}. Give the name the address {address} in /etc/hosts."
        )


@final
class Relay:
    """Passes bytes between JAX's client in this process and a server.

    If the server closes its connection, the relay keeps the client's connection open. The relay
    listens until the process ends.

    Attributes:
        address: ``host:port``, to which JAX connects in place of the server.
    """

    def __init__(self, server: str, patience: float) -> None:
        """Starts to listen. When JAX connects, tries for `patience` seconds to reach the server."""
        host, _, port = server.rpartition(":")
        self._server = host.strip("[]"), int(port)
        self._patience = patience
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        _start(self._listen)

    def _listen(self) -> None:
        while True:  # until the process ends
            _start(self._serve, self._listener.accept()[0])

    def _serve(self, client: socket.socket) -> None:
        with client:
            server = self._connected()
            if server is None:
                return
            with server:
                # If the server closes its connection, the client's connection stays open, and the
                # client waits for an answer. `_pass_on` then drops the data that the client sends.
                _start(_pass_on, server, client)
                _pass_on(client, server)
                with contextlib.suppress(OSError):
                    server.shutdown(socket.SHUT_RDWR)  # ends the other thread's wait for data

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
