"""kerasdist's own environment variables, which ``kerasdist run`` or the user sets."""

from __future__ import annotations

import re
from collections.abc import Mapping

from kerasdist.cluster import addresses
from kerasdist.cluster.source import Membership, Source, Variables
from kerasdist.cluster.spec import ClusterSpec, place_of
from kerasdist.errors import ClusterError

WORKERS = "KERASDIST_WORKERS"
"""The number of workers; or the hosts, or ``host:port``, of all workers, with commas between."""

RANK = "KERASDIST_RANK"
"""The rank of this process among the workers, from 0."""

COORDINATOR = addresses.COORDINATOR_VARIABLE
"""``host:port`` on the machine of rank 0. Optional if `WORKERS` lists hosts."""

LOCAL_RANK = "KERASDIST_LOCAL_RANK"
"""The rank of this process among the workers of this machine, from 0. Optional."""

LOCAL_WORKERS = "KERASDIST_LOCAL_WORKERS"
"""The number of workers on this machine. Optional."""

CLUSTER = "KERASDIST_CLUSTER"
"""The value ``none`` makes this process a job of its own, whatever the other variables say."""

MIRRORED = "KERASDIST_MIRRORED"
"""Set if the workers of the job form a `kerasdist.MirroredStrategy`, each with one device.

The value is the devices by rank, with commas between them, or `EACH_ITS_OWN`, or `JOINED`. The
variable does not describe a cluster.
"""

EACH_ITS_OWN = "own"
"""A value of `MIRRORED`: each worker takes the device that it sees."""

JOINED = "joined"
"""A value of `MIRRORED`, set by a process that has joined the job: its children must not join."""

RESTART = "KERASDIST_RESTART"
"""How often ``kerasdist run`` has restarted the job. The variable does not describe a cluster."""


def read(variables: Variables) -> Membership:
    """Returns this process's membership of a job, from kerasdist's own variables."""
    rank, (count, known, coordinator) = variables.integer(RANK), workers(variables.text(WORKERS))
    local = variables.local([LOCAL_RANK], [LOCAL_WORKERS])
    return variables.worker(rank, count, coordinator, addresses=known, local=local)


def workers(text: str) -> tuple[int, tuple[str, ...], str | None]:
    """Reads ``KERASDIST_WORKERS``: a number, hosts, or addresses.

    Returns the number of workers, their addresses (empty if there are none in the text), and the
    coordinator's address (None if the text has no hosts).
    """
    if text.isdecimal():
        return int(text), (), None
    entries = [entry.strip() for entry in text.split(",")]
    if not all(entries):
        raise ClusterError(
            f"Expected a number, or addresses with commas between them, in {WORKERS}. Received: "
            f"{WORKERS}={text!r}."
        )
    if not any(re.search(r":\d+$", entry) for entry in entries):  # only hosts, without ports
        return len(entries), (), addresses.join(entries[0].strip("[]"), addresses.DEFAULT_PORT)
    _, listed = place_of(ClusterSpec({"worker": entries}), "worker", 0, WORKERS)
    return len(entries), listed, addresses.coordinator_of(listed, WORKERS)


def is_independent(environ: Mapping[str, str] | None) -> bool:
    """Returns whether ``KERASDIST_CLUSTER=none`` makes this process a job of its own."""
    text = Variables(environ, SOURCE.name).optional_text(CLUSTER)
    if text is not None and text.lower() != "none":
        raise ClusterError(
            f"Expected {CLUSTER}=none, or no such variable. Received: {CLUSTER}={text!r}. Unset "
            "it: the other variables describe the cluster."
        )
    return text is not None


def refuse_half_a_cluster(environ: Mapping[str, str] | None) -> None:
    """Refuses ``KERASDIST_WORKERS`` if this process has no rank.

    Otherwise the process would train alone, on all data.
    """
    variables = Variables(environ, SOURCE.name)
    if variables.has(WORKERS):
        raise ClusterError(
            f"Expected {RANK}, or a scheduler that gives each worker its rank. Received: {WORKERS}="
            f"{variables.text(WORKERS)!r}, {RANK}=None. Set {RANK}, from 0, on every worker, start "
            f"the script with `kerasdist run`, or unset {WORKERS}."
        )


def refuse_another_number(environ: Mapping[str, str] | None, count: int, source: str) -> None:
    """Raises an error if ``KERASDIST_WORKERS`` contradicts the number that the source has given."""
    variables = Variables(environ, SOURCE.name)
    if variables.has(WORKERS) and (own := workers(variables.text(WORKERS))[0]) != count:
        raise ClusterError(
            f"Expected one cluster in the environment. Received: {WORKERS}="
            f"{variables.text(WORKERS)!r}, which is {own} workers, but {source} says "
            f"num_workers={count}. Unset {WORKERS}, or set it to {count}."
        )


SOURCE = Source(
    name="KERASDIST",
    needed=(RANK,),
    others=(WORKERS, COORDINATOR, LOCAL_RANK, LOCAL_WORKERS),
    read=read,
    hint=f"Set {COORDINATOR} to host:port on every worker, or list the hosts in {WORKERS}.",
)
