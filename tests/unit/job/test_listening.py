"""Ports that are held until they are used, addresses that others reach, threads that wait."""

import os
import socket
import sys
from concurrent.futures import ThreadPoolExecutor

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


THERE = "10.0.0.2:1"


@pytest.fixture
def named(monkeypatch):
    """Gives the machine a name that leads to an address, and a way to the others."""

    def name(address: str):
        known = {"machine": address}
        monkeypatch.setattr(socket, "gethostname", lambda: "machine")
        monkeypatch.setattr(socket, "gethostbyname", lambda host: known.get(host, host))
        monkeypatch.setattr(listening, "_way_to", lambda host: f"way to {host}")

    return name


def test_a_name_that_leads_to_the_loopback_misleads_other_machines(named):
    named("127.0.1.1")
    assert listening.misleads([THERE, "10.0.0.3:1"]) == "way to 10.0.0.2"
    assert listening.misleads(["127.0.0.1:1", THERE]) == "way to 10.0.0.2"
    for others in (["127.0.0.1:2"], []):  # all workers are on one machine
        assert listening.misleads(others) is None
    named("10.0.0.1")  # which others know
    assert listening.misleads([THERE]) is None


def test_an_interface_is_found_by_its_address():
    names = [name for _, name in socket.if_nameindex()]
    assert listening.interface_of("127.0.0.1") in names
    assert listening.interface_of("203.0.113.7") is None  # of nobody (RFC 5737)
    assert listening._way_to("127.0.0.1") is None


def in_a_thread(function, *args):
    """Returns what a function returns in a thread of its own, which takes its class with it."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function, *args).result()


def classes(of_starter):
    """A thread's own class in a block and after it, and that of one it starts in the block."""
    os.sched_setscheduler(0, of_starter, os.sched_param(0))
    with listening.waiting_their_turn():
        inside, started = os.sched_getscheduler(0), in_a_thread(os.sched_getscheduler, 0)
    return inside, os.sched_getscheduler(0), started


@pytest.mark.skipif(sys.platform != "linux", reason="these are Linux's classes")
def test_threads_that_start_in_the_block_wait_for_their_turn(monkeypatch):
    _, after, started = in_a_thread(classes, os.SCHED_OTHER)
    assert (after, started) == (os.SCHED_OTHER, os.SCHED_BATCH)
    # What the user has chosen stays.
    assert in_a_thread(classes, os.SCHED_IDLE) == (os.SCHED_IDLE,) * 3

    def forbidden(scheduling_class):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(listening, "_choose", forbidden)  # in a sandbox
    assert in_a_thread(classes, os.SCHED_OTHER) == (os.SCHED_OTHER,) * 3
