"""How JAX's workers connect: the relay between its coordination client and the chief."""

import contextlib
import socket
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from kerasdist.backends.jax import connection
from kerasdist.backends.jax.connection import Relay
from kerasdist.cli.launch.placement import free_port
from kerasdist.errors import JobError

SECONDS = 60


def connected(address, patience=SECONDS):
    host, port = Relay(address, patience).address.split(":")
    return socket.create_connection((host, int(port)), timeout=SECONDS)


@contextlib.contextmanager
def server(answer):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(SECONDS)

        def serve():
            connection, _ = listener.accept()
            with connection:
                answer(connection)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        thread.join(SECONDS)
        assert not thread.is_alive()


def test_a_machine_that_others_cannot_reach_by_its_name_is_told_what_to_write(monkeypatch):
    names = {"gethostname": lambda: "machine", "gethostbyname": lambda name: "127.0.1.1"}
    monkeypatch.setattr(connection, "socket", SimpleNamespace(**names))
    monkeypatch.setattr(connection.listening, "misleads", lambda others: "10.0.0.1")
    job: Any = SimpleNamespace(who="[worker 0/2]", other_addresses=["10.0.0.2:1"])
    said = r"\[worker 0/2\] Expected the name of this machine.*'machine', which is 127\.0\.1\.1\. "
    with pytest.raises(JobError, match=said + "Give the name the address 10.0.0.1 in /etc/hosts"):
        connection.check_way_back(job)


def test_the_clients_side_stays_open_when_the_server_dies():
    gone = threading.Event()

    def die(connection):
        connection.recv(5)
        gone.set()

    with server(die) as address, connected(address) as client:
        client.sendall(b"hello")
        assert gone.wait(SECONDS)
        client.settimeout(0.5)
        with pytest.raises(TimeoutError):  # an end of the connection would be b""
            client.recv(1)
        client.sendall(b"heartbeat")  # and what is sent meanwhile goes nowhere
        client.sendall(b"heartbeat")


def test_it_gives_up_a_server_that_never_comes():
    port = free_port()
    with connected(f"127.0.0.1:{port}", patience=0.3) as client:
        assert client.recv(1) == b""


def test_the_server_learns_that_the_client_has_gone():
    reached, ended = threading.Event(), threading.Event()

    def listen(connection):
        assert connection.recv(5) == b"hello"
        reached.set()
        assert connection.recv(5) == b""
        ended.set()

    with server(listen) as address:
        with connected(address) as client:
            client.sendall(b"hello")
            assert reached.wait(SECONDS)
        assert ended.wait(SECONDS)
