"""Addresses, and kerasdist's own port beside one that the environment names.

Workers find each other at the *coordinator*: a port on the machine of rank 0 that is kerasdist's
own. Where an environment names a port, another program listens there: torchrun's agent at
``MASTER_PORT``, TensorFlow's server at each address of ``TF_CONFIG``. The rule for all of them is
`beside`: 1000 further up, and again while that is another worker's port. Where it names none,
`of_job` derives a port from the job's number, so that two jobs on a machine have different ones.
``KERASDIST_COORDINATOR`` overrides both.
"""

from __future__ import annotations

from collections.abc import Sequence

from kerasdist.errors import ClusterError

COORDINATOR_VARIABLE = "KERASDIST_COORDINATOR"

DISTANCE = 1000
"""How far kerasdist's port is from the one that the environment names."""

DEFAULT_PORT = 27182
"""Where the environment tells hosts and nothing else."""

# Ports from 32768 are what Linux gives to outgoing connections: any of them may be in use.
_FIRST_OF_JOBS, _END_OF_JOBS = 20_000, 32_768
_FIRST, _END = 1024, 65_536


def beside(port: int) -> int:
    """Returns kerasdist's port beside another program's: 1000 more, wrapping around at the end."""
    return _FIRST + (port + DISTANCE - _FIRST) % (_END - _FIRST)


def of_job(job: int, step: int = 0) -> int:
    """Returns a port for a numbered job, from 20000 to 32767."""
    # Steps of one job, and jobs that follow each other, are to be far apart. 7919 is prime, and so
    # has no factor in common with the number of ports.
    return _FIRST_OF_JOBS + (job + 7919 * step) % (_END_OF_JOBS - _FIRST_OF_JOBS)


def join(host: str, port: int) -> str:
    """Returns ``host:port``, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split(address: str, name: str) -> tuple[str, int]:
    """Splits ``host:port``."""
    host, _, port = address.strip().rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not host or (":" in host and not bracketed) or not port.isdecimal():
        raise ClusterError(
            f"Expected addresses of the form host:port, or [host]:port for IPv6, in {name}. "
            f"Received: {name}={address!r}."
        )
    if not 0 < int(port) < _END:
        raise ClusterError(
            f"Expected a port from 1 to {_END - 1} in {name}. Received: {name}={address!r}."
        )
    return host.strip("[]"), int(port)


def coordinator_of(addresses: Sequence[str], name: str) -> str:
    """Returns the coordinator where other programs listen at `addresses`."""
    (host, port), *others = [split(address, name) for address in addresses]
    taken = {taken for _, taken in others}
    port = beside(port)
    while port in taken:
        port = beside(port)
    return join(host, port)
