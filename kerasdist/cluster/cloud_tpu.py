"""Cloud TPU: one or several slices of hosts, with one process per host."""

from __future__ import annotations

from typing import final

from kerasdist.cluster import ports
from kerasdist.cluster.membership import Membership
from kerasdist.cluster.resolver import EnvironmentResolver
from kerasdist.cluster.source import Absent, Kind, Source
from kerasdist.cluster.variables import Variables


def read(variables: Variables) -> Membership | Absent:
    """Reads the variables that GKE sets on TPU hosts, and their ``MEGASCALE_*`` for slices."""
    if not variables.has("TPU_WORKER_ID", "TPU_WORKER_HOSTNAMES"):
        return Absent("TPU_WORKER_ID and TPU_WORKER_HOSTNAMES are not both set.")
    hosts = [host.strip() for host in variables.text("TPU_WORKER_HOSTNAMES").split(",")]
    slices = variables.optional_integer("MEGASCALE_NUM_SLICES") or 1
    count = len(hosts) * slices
    if count == 1:
        return Absent("This TPU slice has one host.")
    index = variables.optional_integer("MEGASCALE_SLICE_ID") or 0
    rank = index * len(hosts) + variables.integer("TPU_WORKER_ID")
    # libtpu's own coordinator listens at this port, if it is set.
    first = hosts[0]
    if slices > 1:
        first = variables.text("MEGASCALE_COORDINATOR_ADDRESS").partition(":")[0]
    return Membership(
        task_type="worker",
        task_id=rank,
        rank=rank,
        num_workers=count,
        addresses=(),
        coordinator=variables.coordinator(ports.join(first, ports.DEFAULT_PORT)),
        source=SOURCE.name,
        local_rank=0,
        local_workers=1,
    )


SOURCE = Source(
    name="Cloud TPU",
    kind=Kind.PLACE,
    variables=(
        "TPU_WORKER_ID",
        "TPU_WORKER_HOSTNAMES",
        "MEGASCALE_NUM_SLICES",
        "MEGASCALE_SLICE_ID",
        "MEGASCALE_COORDINATOR_ADDRESS",
    ),
    read=read,
)


@final
class CloudTPUClusterResolver(EnvironmentResolver):
    """The cluster that the hosts of a Cloud TPU make.

    Args:
        environ: The variables; None for this process's own.

    Raises:
        ClusterError: If they are missing or wrong.
    """

    _source = SOURCE
