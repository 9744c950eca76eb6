"""Which address of a machine the other workers can reach."""

from __future__ import annotations

import socket

import pytest

from kerasdist.job import listening

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
