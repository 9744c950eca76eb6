"""Kubernetes: an indexed Job, or a JobSet of one job, with a headless service."""

from __future__ import annotations

from typing import final

from kerasdist.cluster import kerasdist_variables, ports
from kerasdist.cluster.membership import Membership
from kerasdist.cluster.resolver import EnvironmentResolver
from kerasdist.cluster.source import Absent, Kind, Source
from kerasdist.cluster.variables import Variables
from kerasdist.errors import ClusterError

_INDEX = "JOB_COMPLETION_INDEX"
_SERVICE = "KERASDIST_SERVICE"


def read(variables: Variables) -> Membership | Absent:
    """Reads the pod's index, and what the Job's manifest says of the others.

    Kubernetes gives a pod its index, but not the number of pods: ``KERASDIST_WORKERS`` has it.
    Without it the pods of a Job are independent.
    """
    if not variables.has(_INDEX):
        return Absent(f"{_INDEX} is not set.")
    if not variables.has(kerasdist_variables.WORKERS):
        return Absent(
            f"{_INDEX} is set, but {kerasdist_variables.WORKERS}, the number of pods, is not."
        )
    rank = variables.integer(_INDEX)
    count, addresses, coordinator = kerasdist_variables.workers(
        variables.text(kerasdist_variables.WORKERS)
    )
    if variables.has(kerasdist_variables.COORDINATOR):
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
            f"the manifest, or {kerasdist_variables.COORDINATOR} to host:port of pod 0."
        )
    return ports.join(f"{job}-0.{variables.text(_SERVICE)}", ports.DEFAULT_PORT)


SOURCE = Source(
    name="Kubernetes",
    kind=Kind.PLACE,
    variables=(_INDEX, kerasdist_variables.WORKERS, _SERVICE, "HOSTNAME"),
    read=read,
)


@final
class KubernetesClusterResolver(EnvironmentResolver):
    """The cluster that the pods of an indexed Kubernetes Job make.

    Args:
        environ: The variables; None for this process's own.

    Raises:
        ClusterError: If they are missing or wrong.
    """

    _source = SOURCE
