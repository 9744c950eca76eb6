"""The ports of a job on one machine: held until they are used, and on loopback."""

import re
import socket

import pytest

from tests.conformance.registry import BACKENDS
from tests.multiprocess.forks import nursery, report
from tests.multiprocess.launching import job_of

SECONDS = 900


def as_linux_writes(address: str) -> set[str]:
    """An IPv4 address as /proc/net/tcp and /proc/net/tcp6 write it."""
    number = socket.inet_aton(address)[::-1].hex().upper()
    return {number, f"0000000000000000FFFF0000{number}"}


def may_listen_on(backend: str) -> set[str]:
    """What docs/guides/from-laptop-to-cluster.md says of each backend."""
    loopback = as_linux_writes("127.0.0.1")
    match backend:
        case "tensorflow":  # its server listens on all interfaces (2.21)
            return {*loopback, "0" * 32, "0" * 8}
        case "jax":  # its sums listen at the address of the machine's name (0.10)
            return loopback | as_linux_writes(socket.gethostbyname(socket.gethostname()))
        case _:
            return loopback


@pytest.mark.parametrize("backend", BACKENDS)
def test_ports_are_held_and_on_loopback(backend):
    workers = job_of(2, "127.0.0.1", KERASDIST_SECRET="as the launcher makes one")
    ended = nursery(backend).begin(["tests.multiprocess.network_script"], workers).join(SECONDS)
    for one in ended:
        assert one.code == 0, report(ended)
        assert "grabbed none" in one.output, report(ended)
        assert "is open" not in one.output, report(ended)  # it has a secret
        [addresses] = re.findall(r"listens on (.*)", one.output)
        assert set(addresses.split()) <= may_listen_on(backend), report(ended)
