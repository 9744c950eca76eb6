"""Reads lists of hosts and addresses, and chooses the port of kerasdist's coordinator.

Workers find each other at the *coordinator*: a port of kerasdist's own on the machine of rank 0. If
the environment names a port, another program listens there: torchrun's agent at ``MASTER_PORT``,
TensorFlow's server at each address of ``TF_CONFIG``. In these cases the coordinator's port is the
named port plus 1000 (`beside`). While that sum is the port of another worker, 1000 is added again.
If the environment names no port, `of_job` derives one from the job's number, so that two jobs on a
machine have different ports. ``KERASDIST_COORDINATOR`` overrides any such choice.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

from kerasdist.errors import ClusterError

COORDINATOR_VARIABLE = "KERASDIST_COORDINATOR"

DISTANCE = 1000
"""kerasdist's port is the port that the environment names, plus this number."""

DEFAULT_PORT = 27182
"""kerasdist's port, if the environment describes hosts without ports."""

# Linux uses ports from 32768 for outgoing connections, so any of them may be in use.
_FIRST_OF_JOBS, _END_OF_JOBS = 20_000, 32_768
_FIRST, _END = 1024, 65_536


def beside(port: int) -> int:
    """Returns kerasdist's port if another program has `port`.

    The result is `port` plus 1000. Sums above 65535 continue from 1024 on.
    """
    return _FIRST + (port + DISTANCE - _FIRST) % (_END - _FIRST)


def of_job(job: int, step: int = 0) -> int:
    """Returns a port from 20000 to 32767 for a job with the number `job`.

    A job of Slurm may have several steps, and each step gets a different port.
    """
    # The ports of consecutive jobs are consecutive, so the ports of one job's steps are far apart.
    # 7919 and the number of ports have no factor in common, so the steps have different ports.
    return _FIRST_OF_JOBS + (job + 7919 * step) % (_END_OF_JOBS - _FIRST_OF_JOBS)


def join(host: str, port: int) -> str:
    """Returns ``host:port``, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split(address: str, name: str) -> tuple[str, int]:
    """Returns the host and the port of an address; error messages call it `name`."""
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
    """Returns the coordinator's address: the first host, with a port that is not in `addresses`."""
    (host, port), *others = [split(address, name) for address in addresses]
    taken = {taken for _, taken in others}
    port = beside(port)
    while port in taken:
        port = beside(port)
    return join(host, port)


_ENTRY = re.compile(r"(?:[^,\[\]]|\[[^\[\]]*\])+")
_PART = re.compile(r"\[([^\[\]]*)\]|([^\[\]]+)")


def expand(text: str, name: str) -> list[str]:
    """Returns the hosts of a list in Slurm's notation, in order.

    Numbers keep their leading zeros, and an entry may have several ranges. So ``rack[0-1]n[08-10]``
    is six hosts.
    """
    entries = _ENTRY.findall(text)
    if not entries or ",".join(entries) != text:
        raise _wrong(text, name)
    hosts: list[str] = []
    for entry in entries:
        parts = [
            _numbers(numbers, text, name) if plain == "" else [plain]
            for numbers, plain in _PART.findall(entry)
        ]
        hosts.extend("".join(chosen) for chosen in itertools.product(*parts))
    return hosts


def counts(text: str, name: str) -> list[int]:
    """Returns the numbers per node from Slurm's short form: ``2(x3),1`` is 2, 2, 2, 1."""
    numbers: list[int] = []
    for entry in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", entry.strip())
        if match is None:
            raise ClusterError(
                f"Expected numbers by node, such as '2(x3),1', in {name}. "
                f"Received: {name}={text!r}."
            )
        numbers += [int(match[1])] * int(match[2] or 1)
    return numbers


def _numbers(ranges: str, text: str, name: str) -> list[str]:
    numbers: list[str] = []
    for each in ranges.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", each)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise _wrong(text, name)
        first, last = match[1], match[2] or match[1]
        numbers += [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)]
    return numbers


def _wrong(text: str, name: str) -> ClusterError:
    return ClusterError(
        f"Expected a list of hosts, such as 'a[01-03,7],b', in {name}. Received: {name}={text!r}."
    )
