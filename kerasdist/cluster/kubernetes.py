"""Kubernetes: an indexed Job, or a JobSet of one job, with a headless service."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

from kerasdist.cluster import own, ports
from kerasdist.cluster.membership import Membership
from kerasdist.cluster.resolver import ClusterResolver
from kerasdist.cluster.source import Absent, Kind, Source
from kerasdist.cluster.variables import Variables
from kerasdist.errors import ClusterError

_INDEX = "JOB_COMPLETION_INDEX"
_SERVICE = "KERASDIST_SERVICE"


def read(variables: Variables) -> Membership | Absent:
    """Reads the pod's index, and what the Job's manifest says of the others.

    Kubernetes tells a pod its index, but not how many pods there are: ``KERASDIST_WORKERS`` does.
    A Job without it is one whose pods have nothing to do with each other.
    """
    if not variables.has(_INDEX):
        return Absent(f"{_INDEX} is not set.")
    if not variables.has(own.WORKERS):
        return Absent(f"{_INDEX} is set, but {own.WORKERS}, the number of pods, is not.")
    rank = variables.integer(_INDEX)
    count, addresses, coordinator = own.workers(variables.text(own.WORKERS))
    if variables.has(own.COORDINATOR):
        coordinator = variables.coordinator(None)
    elif coordinator is None and count > 1:
        coordinator = _first_pod(variables, rank)
    return Membership(
        task_type="worker",
        task_id=rank,
        rank=rank,
        num_workers=count,
        addresses=addresses,
        coordinator=coordinator,
        source=SOURCE.name,
        local_rank=0,
        local_workers=1,
    )


def _first_pod(variables: Variables, rank: int) -> str:
    """Returns the address of pod 0. A pod is named by its index: ``<job>-<index>.<service>``."""
    host = variables.text("HOSTNAME")
    job, _, index = host.rpartition("-")
    if not variables.has(_SERVICE) or not job or index != str(rank):
        raise ClusterError(
            f"Expected {_SERVICE}, the headless service that is the Job's subdomain, and a "
            f"HOSTNAME that ends with the pod's index. Received: {_SERVICE}="
            f"{variables.optional_text(_SERVICE)!r}, HOSTNAME={host!r}, {_INDEX}={rank}. Set it in "
            f"the manifest, or {own.COORDINATOR} to host:port of pod 0."
        )
    return ports.join(f"{job}-0.{variables.text(_SERVICE)}", ports.DEFAULT_PORT)


SOURCE = Source(
    name="Kubernetes",
    kind=Kind.PLACE,
    variables=(_INDEX, own.WORKERS, _SERVICE, "HOSTNAME"),
    read=read,
)


@final
class KubernetesClusterResolver(ClusterResolver):
    """The cluster that the pods of an indexed Kubernetes Job make.

    Args:
        environ: The variables; None for this process's own.

    Raises:
        ClusterError: If they are missing or wrong.
    """

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        self._membership = SOURCE.membership(environ)

    def membership(self) -> Membership:
        """Returns this process's place in the job."""
        return self._membership
