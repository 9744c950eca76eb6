"""Ports that are held until they are used."""

import os
import socket

import pytest

from kerasdist.errors import JobError
from kerasdist.job import listening
from kerasdist.job.listening import HeldPort, is_loopback


def test_which_hosts_are_this_machine_alone():
    assert all(map(is_loopback, ["localhost", "127.0.0.1", "127.0.1.1", "::1"]))
    assert not any(map(is_loopback, ["10.0.0.1", "::", "0.0.0.0", "a-name", ""]))


@pytest.mark.parametrize("loopback", [True, False])
def test_no_other_process_takes_a_held_port(loopback):
    held = HeldPort(loopback=loopback)
    for host in ("127.0.0.1", ""):
        with pytest.raises(OSError, match="in use"):
            socket.create_server((host, held.number))
    held.release()
    socket.create_server(("127.0.0.1", held.number)).close()


@pytest.mark.parametrize("loopback", [True, False])
def test_a_framework_listens_on_it(loopback):
    held = HeldPort(loopback=loopback)
    with socket.socket(fileno=held.listening()) as server:
        assert server.getsockname()[0] == ("127.0.0.1" if loopback else "::")
        with socket.create_connection(("127.0.0.1", held.number), timeout=5):
            server.accept()[0].close()


def test_a_port_in_use_is_an_error():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(JobError, match=f"port {port} .* to be free.*framework's own server"):
            HeldPort(loopback=True, port=port)
        with pytest.raises(JobError, match=f"port {port} .* to be free.*KERASDIST_COORDINATOR"):
            listening.listen("localhost", port)


def test_the_chief_listens_on_what_the_launcher_opened(monkeypatch):
    opened = socket.create_server(("127.0.0.1", 0))
    port = opened.getsockname()[1]
    monkeypatch.setenv(listening.COORDINATOR_FD, str(opened.detach()))
    with listening.listen("127.0.0.1", port) as server:
        assert server.getsockname()[1] == port
        assert not server.get_inheritable()
        assert listening.COORDINATOR_FD not in os.environ


def test_a_socket_of_another_port_is_left_alone(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as other:
        monkeypatch.setenv(listening.COORDINATOR_FD, str(other.fileno()))
        with listening.listen("127.0.0.1", 0) as server:
            assert server.fileno() != other.fileno()
        assert other.getsockname()
