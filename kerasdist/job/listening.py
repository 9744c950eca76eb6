"""Helpers for connections of workers: ports, reachable addresses, limits, and threads."""

from __future__ import annotations

import contextlib
import ipaddress
import math
import os
import socket
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import final

from kerasdist.cluster import addresses
from kerasdist.errors import JobError

COORDINATOR_FD = "KERASDIST_COORDINATOR_FD"
"""The environment variable with the file descriptor of a socket for the chief to listen on.

``kerasdist run`` opens this socket and sets the variable.
"""

BACKLOG = 65535
"""The number of connections that may wait to be accepted, unless the kernel's limit is lower."""

# How many connections a process may have for each worker of its job: to the coordinator, to
# PyTorch's store, for Gloo, and a spare one.
_CONNECTIONS_EACH = 4

# How many files a process may have open that are not connections to workers.
_OTHER_FILES = 512


def is_loopback(host: str) -> bool:
    """Returns whether a host name or address can be reached only from this machine."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # any other name
        return False


def address_in(facts: Mapping[str, object]) -> str:
    """Returns the ``host:port`` at which other workers reach a worker's framework.

    Args:
        facts: What the worker has told the coordinator about itself. ``"given"`` is the address
            that the cluster's description gives the worker, or None.
    """
    given = facts.get("given")
    return f"{facts.get('address')}:{facts.get('port')}" if given is None else str(given)


def leads_here(address: str) -> bool:
    """Returns whether ``host:port`` can be reached only from this machine."""
    return is_loopback(_host_in(address))


def raise_file_limit(workers: int) -> float:
    """Raises this process's soft limit of open files to what a job of `workers` workers may need.

    Returns the limit that then holds, which may be lower than needed.
    """
    import resource  # imported here, because Windows lacks this module

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return math.inf
    wanted = _CONNECTIONS_EACH * workers + _OTHER_FILES
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft < wanted:
        # On some systems this call fails, because they allow fewer files than the hard limit says.
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            return wanted
    return soft


def require_file_descriptors(workers: int) -> None:
    """Raises JobError if this process may not open a connection for each worker."""
    needed = workers + _OTHER_FILES
    allowed = raise_file_limit(workers)
    if allowed < needed and workers > 1:
        raise JobError(
            f"Expected worker 0 to be allowed {needed} open files: one for each of {workers} "
            f"workers, and {_OTHER_FILES} others. Received: a limit of {allowed} (ulimit -Hn). "
            "Raise it on the machine of worker 0: in /etc/security/limits.conf, LimitNOFILE= of "
            "the scheduler's service, or --ulimit nofile= of the container."
        )


def listen(host: str, port: int) -> socket.socket:
    """Returns the socket on which the chief listens for workers.

    If the launcher opened a socket for the chief, that socket is returned. So no other process can
    take the port after the launcher has chosen it.
    """
    inherited = _inherited(port)
    if inherited is not None:
        return inherited
    try:
        return socket.create_server(
            ("127.0.0.1" if is_loopback(host) else "", port), backlog=BACKLOG
        )
    except OSError as error:
        raise JobError(
            f"Expected port {port} of this machine to be free, for the workers of the job to "
            f"connect to. Received: {error}. End the process that has it, start the job again (a "
            f"launcher then chooses another port), or set {addresses.COORDINATOR_VARIABLE}="
            f"{host}:<another port> for all workers."
        ) from error


def _inherited(port: int) -> socket.socket | None:
    """Returns the socket that the launcher opened for this port; None if there is none."""
    number = os.environ.pop(COORDINATOR_FD, "")
    if not number.isdecimal():
        return None
    try:
        opened = socket.socket(fileno=int(number))
    except OSError:  # the descriptor is closed, or is not a socket
        return None
    if opened.getsockname()[1] != port:
        opened.detach()
        return None
    opened.set_inheritable(False)
    return opened


@final
class HeldPort:
    """A port of this machine that no other process can take until a framework listens on it.

    A socket is bound to the port, but does not listen. The socket has the option SO_REUSEPORT. So
    another socket can be bound to the same port only if it has this option, too, and belongs to the
    same user. The framework's server sets the option, so it can listen on the port at any time.

    Attributes:
        number: The number of the port.
    """

    def __init__(self, *, loopback: bool, port: int = 0) -> None:
        dual = not loopback and socket.has_dualstack_ipv6()
        self._socket = socket.socket(socket.AF_INET6 if dual else socket.AF_INET)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if dual:
                self._socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            self._socket.bind(("127.0.0.1" if loopback else "", port))
        except OSError as error:
            self._socket.close()
            raise JobError(
                f"Expected port {port} of this machine to be free, for the framework's own server. "
                f"Received: {error}. End the process that has it, or give this worker another "
                "address."
            ) from error
        self.number: int = self._socket.getsockname()[1]

    def listening(self) -> int:
        """Returns the descriptor of a listening socket on the port; the caller must close it."""
        self._socket.listen(BACKLOG)
        return self._socket.detach()

    def release(self) -> None:
        """Closes this socket. A framework's server on the port is not affected."""
        self._socket.close()


# The number of Linux's request for the address of a network interface, and the bytes of the answer
# that contain the address (netdevice(7)).
_SIOCGIFADDR = 0x8915
_ADDRESS = slice(20, 24)


def misleads(others: Sequence[str]) -> str | None:
    """Returns this machine's address for other workers, if its host name would mislead them.

    Gloo, which PyTorch and JAX use for collectives on CPUs, gives the other workers the address to
    which this machine's name resolves. On Debian and Ubuntu the name resolves to a loopback
    address, which other machines cannot reach.

    Returns None if the name does not resolve to a loopback address, or if all other workers are on
    this machine.

    Args:
        others: Addresses of other workers. One of them on another machine is enough to find the
            network interface.
    """
    if not _resolves_to_loopback(socket.gethostname()):
        return None
    far = next((host for host in map(_host_in, others) if not _resolves_to_loopback(host)), None)
    return None if far is None else _way_to(far)


def interface_of(address: str) -> str | None:
    """Returns the name of the network interface that has this address; None if none is found."""
    import fcntl  # imported here, because Windows has no such module

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(asked, _SIOCGIFADDR, request)
            except OSError:  # the interface has no address, or the system has no such request
                continue
            if socket.inet_ntoa(answer[_ADDRESS]) == address:
                return name
    return None


def _host_in(address: str) -> str:
    return address.rpartition(":")[0].strip("[]")


def _resolves_to_loopback(host: str) -> bool:
    try:
        return is_loopback(socket.gethostbyname(host))
    except OSError:
        return False


def _way_to(host: str) -> str | None:
    """Returns this machine's address on the route to a host, without sending anything."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as packet:
        try:
            packet.connect((host, 9))  # any port will do
        except OSError:
            return None
        address = packet.getsockname()[0]
    return None if is_loopback(address) else address


@contextlib.contextmanager
def waiting_their_turn() -> Iterator[None]:
    """Lets the threads that are started in this block wake up without preempting other threads.

    Gloo, which PyTorch and JAX use for collectives on CPUs, has a thread that distributes the data
    that arrive from other workers. To read from a connection, this thread must hold the
    connection's lock. If another thread holds the lock, the distributing thread asks the kernel
    again which data have arrived, gets the same answer at once, and so on
    (``Pair::handleEvents`` in gloo/transport/tcp/pair.cc only tries the lock).

    On a busy machine the lock is often held by a thread that is not running. While that thread was
    sending on the connection, a message woke up the distributing thread, and the kernel ran the
    distributing thread instead. The connection then stands still until the time slice of the
    distributing thread ends, after 3 ms on Linux. Without that delay, the sum of a few numbers
    takes 0.1 ms. (Measured with jaxlib 0.10.2 and two workers of one core each: 60 small sums take
    228 ms, and 6 ms with the remedy.)

    The remedy is Linux's batch class: a thread of that class gets the same share of the cores, but
    does not interrupt a running thread when it wakes up (sched(7)). A thread inherits the class of
    the thread that starts it.

    If the system lacks or forbids that scheduling class, or if the user has chosen another class,
    this function changes nothing.
    """
    if sys.platform != "linux" or os.sched_getscheduler(0) != os.SCHED_OTHER:
        yield
        return
    try:
        _choose(os.SCHED_BATCH)
    except OSError:  # a sandbox may forbid to change the class
        yield
        return
    try:
        yield
    finally:
        _choose(os.SCHED_OTHER)


def _choose(scheduling_class: int) -> None:
    os.sched_setscheduler(0, scheduling_class, os.sched_param(0))
