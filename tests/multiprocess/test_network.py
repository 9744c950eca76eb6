"""The ports of a job on one machine: held until they are used, and on loopback."""

import contextlib
import re
import socket

import pytest

from tests.multiprocess.processes import Processes, report

SECONDS = 900
BACKENDS = ("tensorflow", "jax", "torch")


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


@pytest.fixture(scope="module")
def jobs():
    """The jobs of all backends, begun together, since they wait for each other's workers."""
    script = ["-m", "kerasdist", "run", "--workers", "2", "-m", "tests.multiprocess.network_script"]
    with contextlib.ExitStack() as stack:
        yield {
            backend: stack.enter_context(Processes([script], [{"KERAS_BACKEND": backend}]))
            for backend in BACKENDS
        }


@pytest.mark.parametrize("backend", BACKENDS)
def test_ports_are_held_and_on_loopback(jobs, backend):
    ended = jobs[backend].join(SECONDS)
    assert ended[0].code == 0, report(ended)
    said = ended[0].output
    assert said.count("grabbed none") == 2, report(ended)
    assert "is open" not in said, report(ended)  # it has a secret
    listening = re.findall(r"listens on (.*)", said)
    assert len(listening) == 2, report(ended)
    for addresses in listening:
        assert set(addresses.split()) <= may_listen_on(backend), report(ended)
