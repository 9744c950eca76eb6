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


def test_it_does_not_where_all_workers_are_on_one_machine(named):
    named("127.0.1.1")
    assert listening.misleads(["127.0.0.1:2"]) is None
    assert listening.misleads([]) is None


def test_a_name_that_others_know_does_not_mislead(named):
    named("10.0.0.1")
    assert listening.misleads([THERE]) is None


def test_an_interface_is_found_by_its_address():
    names = [name for _, name in socket.if_nameindex()]
    assert listening.interface_of("127.0.0.1") in names
    assert listening.interface_of("203.0.113.7") is None  # of nobody (RFC 5737)


def test_the_way_to_this_machine_is_the_loopback_which_is_no_answer():
    assert listening._way_to("127.0.0.1") is None
