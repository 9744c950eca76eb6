"""The address by which other workers reach this machine.

Gloo, with which PyTorch and JAX sum on CPUs, gives the others the address that this machine's name
resolves to. On Debian and Ubuntu that is a loopback address, which other machines cannot reach.
"""

from __future__ import annotations

import ipaddress
import socket
import struct
from collections.abc import Sequence

# Linux's request for the address of an interface, and the offset of the answer (netdevice(7)).
_SIOCGIFADDR = 0x8915
_ADDRESS = slice(20, 24)


def misleads(others: Sequence[str]) -> str | None:
    """Returns this machine's address for others, None if its own name leads to that already.

    Args:
        others: The addresses of other workers. The first on another machine is enough.
    """
    if not _is_loopback(socket.gethostname()):
        return None
    hosts = (address.rpartition(":")[0].strip("[]") for address in others)
    far = next((host for host in hosts if not _is_loopback(host)), None)
    return None if far is None else _way_to(far)


def interface_of(address: str) -> str | None:
    """Returns the name of the network interface with an address, None if it is not known."""
    try:
        import fcntl
    except ImportError:  # Windows has none, and nothing else here that it lacks
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(asked, _SIOCGIFADDR, request)
            except OSError:  # it has no address, or this system does not know the request
                continue
            if socket.inet_ntoa(answer[_ADDRESS]) == address:
                return name
    return None


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(socket.gethostbyname(host)).is_loopback
    except OSError:
        return False


def _way_to(host: str) -> str | None:
    """Returns the address of this machine on its route to a host; sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as packet:
        try:
            packet.connect((host, 9))  # any port
        except OSError:
            return None
        address = packet.getsockname()[0]
    return None if _is_loopback(address) else address
