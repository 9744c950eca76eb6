"""Slurm's lists of hosts, and the arithmetic of ports."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kerasdist.cluster import addresses
from kerasdist.errors import ClusterError


@pytest.mark.parametrize(
    ("read", "text", "expected"),
    [
        (addresses.expand, "n1", ["n1"]),
        (addresses.expand, "a[01-03,7],b2", ["a01", "a02", "a03", "a7", "b2"]),
        (addresses.expand, "gpu[008-010]", ["gpu008", "gpu009", "gpu010"]),
        (addresses.expand, "n[9-11]", ["n9", "n10", "n11"]),
        (addresses.expand, "rack[0-1]n[8-9]", ["rack0n8", "rack0n9", "rack1n8", "rack1n9"]),
        (addresses.expand, "n[1-2]-ib.example", ["n1-ib.example", "n2-ib.example"]),
        (addresses.counts, "2(x3),1", [2, 2, 2, 1]),
        (addresses.counts, "4", [4]),
    ],
)
def test_hosts_and_counts(read, text, expected):
    assert read(text, "it") == expected


@pytest.mark.parametrize(
    ("read", "text"),
    [
        *((addresses.expand, text) for text in ("", "a[1-", "a]", "a,,b", "a,", "a[3-1]", "a[x]")),
        *((addresses.expand, "a[]"), (addresses.counts, "")),
        *((addresses.counts, text) for text in ("2(x)", "a", "2,,1")),
    ],
)
def test_what_is_none_of_them(read, text):
    with pytest.raises(ClusterError, match="Received: it="):
        read(text, "it")


@given(st.integers(1, 65_535))
def test_beside_a_port_is_another_one(port):
    assert 1024 <= addresses.beside(port) < 65_536
    assert addresses.beside(port) != port


@given(st.integers(0, 2**33), st.integers(0, 2**16))
def test_a_jobs_port_is_below_those_of_outgoing_connections(job, step):
    assert 20_000 <= addresses.of_job(job, step) < 32_768


@given(st.sampled_from(["a.example", "10.0.0.1", "fe80::1"]), st.integers(1, 65_535))
def test_an_address_is_put_together_and_taken_apart(host, port):
    assert addresses.split(addresses.join(host, port), "it") == (host, port)
