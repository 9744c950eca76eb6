"""Cloud TPU: one or several slices of hosts, with one process per host."""

from __future__ import annotations

from collections.abc import Iterator
from typing import final

from kerasdist.cluster import ports, tpu_metadata
from kerasdist.cluster.membership import Membership
from kerasdist.cluster.resolver import EnvironmentResolver
from kerasdist.cluster.source import Absent, Kind, Source
from kerasdist.cluster.variables import Variables
from kerasdist.errors import ClusterError

# The attributes of a TPU VM that tell its place, and the variable that forbids asking for them.
_ATTRIBUTES = ("agent-worker-number", "worker-network-endpoints", "tpu-env")
_NO_METADATA = "TPU_SKIP_MDS_QUERY"


def read(variables: Variables) -> Membership | Absent:
    """Reads the variables that GKE sets on TPU hosts; on other TPU hosts, the VM's metadata."""
    if variables.has("TPU_WORKER_ID", "TPU_WORKER_HOSTNAMES"):
        hosts = [host.strip() for host in variables.text("TPU_WORKER_HOSTNAMES").split(",")]
        return _membership(variables, hosts, variables.integer("TPU_WORKER_ID"))
    missing = "TPU_WORKER_ID and TPU_WORKER_HOSTNAMES are not both set"
    if variables.has(_NO_METADATA):
        return Absent(f"{missing}, and {_NO_METADATA} is.")
    if not tpu_metadata.has_tpus():
        return Absent(f"{missing}, and no TPU is attached to this machine.")
    host = variables.optional_text("GCE_METADATA_IP") or tpu_metadata.DEFAULT_HOST
    try:
        told = {name: tpu_metadata.attribute(host, name) for name in _ATTRIBUTES}
    except OSError as error:
        return Absent(f"{missing}, and the metadata server {host} does not answer: {error}.")
    number, endpoints, settings = told.values()
    if number is None or endpoints is None:
        return Absent(f"{missing}, and the VM's metadata do not tell of a TPU slice.")
    own = {"TPU_WORKER_ID": number, **dict(_settings_of(settings or "")), **variables.all}
    slices = Variables(own, SOURCE.name)
    hosts = [_host_of(one) for one in endpoints.split(",")]
    return _membership(slices, hosts, slices.integer("TPU_WORKER_ID"))


def _membership(variables: Variables, hosts: list[str], worker: int) -> Membership | Absent:
    """Returns a worker's membership; environment variables describe the other slices."""
    slices = variables.optional_integer("MEGASCALE_NUM_SLICES") or 1
    count = len(hosts) * slices
    if count == 1:
        return Absent("This TPU slice has one host.")
    index = variables.optional_integer("MEGASCALE_SLICE_ID") or 0
    rank = index * len(hosts) + worker
    # With several slices, the host of libtpu's own coordinator, on rank 0's machine.
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


def _host_of(endpoint: str) -> str:
    """Returns the host of an entry of ``worker-network-endpoints``: a host, or name:number:host."""
    parts = endpoint.strip().split(":")
    if not parts[-1] or len(parts) not in (1, 3):
        raise ClusterError(
            "Expected the entries of the TPU VM's metadata worker-network-endpoints to be hosts, "
            f"or name:number:host. Received: entry={endpoint!r}. Set KERASDIST_WORKERS and "
            "KERASDIST_RANK by hand."
        )
    return parts[-1]


def _settings_of(lines: str) -> Iterator[tuple[str, str]]:
    """Yields the settings of the attribute ``tpu-env``, whose lines are as ``NAME: 'value'``."""
    for line in lines.splitlines():
        name, colon, value = line.partition(":")
        if colon and name.strip() in SOURCE.variables:
            yield name.strip(), value.strip().strip("'\"")


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
