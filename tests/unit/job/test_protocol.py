"""Messages between workers."""

import socket

import pytest

from kerasdist.job import protocol


@pytest.fixture
def ends():
    one, other = socket.socketpair()
    with one, other:
        one.settimeout(5)
        other.settimeout(5)
        yield one, other


def test_an_end_in_the_middle_is_an_error(ends):
    one, other = ends
    one.sendall(protocol.packed({"type": "beat"})[:-1])
    one.close()
    with pytest.raises(ConnectionError, match="closed"):
        protocol.receive(other)


@pytest.mark.parametrize("stranger", [b"GET / HTTP/1.1\r\n\r\n", b"\x00\x00\x00\x02\xff\xff"])
def test_a_stranger_is_recognised(ends, stranger):
    one, other = ends
    one.sendall(stranger)
    with pytest.raises(ConnectionError, match="not a kerasdist worker"):
        protocol.receive(other)


def test_tensors_are_not_for_this_way(monkeypatch):
    monkeypatch.setattr(protocol, "_FRAME_BYTES", 100)
    with pytest.raises(ValueError, match="by collectives"):
        protocol.packed("x" * 100)
