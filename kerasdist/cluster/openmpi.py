"""Open MPI's ``mpirun``, which starts any program, MPI or not."""

from __future__ import annotations

import re
import zlib
from typing import final

from kerasdist.cluster import ports
from kerasdist.cluster.membership import Membership
from kerasdist.cluster.resolver import EnvironmentResolver
from kerasdist.cluster.source import Absent, Kind, Source
from kerasdist.cluster.variables import Variables

_NAMESPACE = "PMIX_NAMESPACE"  # Open MPI 5: prterun-<host of mpirun>-<its process>@<job>
_URI = "OMPI_MCA_orte_hnp_uri"  # Open MPI 4: <job>.0;tcp://<addresses of mpirun>:<port>


def read(variables: Variables) -> Membership | Absent:
    """Reads Open MPI's variables.

    Rank 0 is taken to be on the machine of ``mpirun``. That is right unless a list of hosts leaves
    that machine out.
    """
    if not variables.has("OMPI_COMM_WORLD_RANK"):
        return Absent("OMPI_COMM_WORLD_RANK is not set.")
    rank = variables.integer("OMPI_COMM_WORLD_RANK")
    count = variables.integer("OMPI_COMM_WORLD_SIZE")
    local_workers = variables.optional_integer("OMPI_COMM_WORLD_LOCAL_SIZE")
    coordinator = variables.coordinator(_coordinator(variables, local_workers == count))
    return Membership(
        task_type="worker",
        task_id=rank,
        rank=rank,
        num_workers=count,
        addresses=(),
        coordinator=coordinator,
        source=SOURCE.name,
        local_rank=variables.optional_integer("OMPI_COMM_WORLD_LOCAL_RANK"),
        local_workers=local_workers,
    )


def _coordinator(variables: Variables, one_machine: bool) -> str | None:
    told = variables.optional_text(_URI, _NAMESPACE)
    # Equal on every rank of a job, and different in every job.
    port = ports.DEFAULT_PORT if told is None else ports.of_job(zlib.crc32(told.encode()))
    host = "127.0.0.1" if one_machine else _machine_of_mpirun(told or "")
    return None if host is None else ports.join(host, port)


def _machine_of_mpirun(told: str) -> str | None:
    uri = re.search(r"tcp6?://(?:\[([^\],]+)|([^,:\[]+))", told)
    if uri is not None:
        return uri[1] or uri[2]
    namespace = re.fullmatch(r"prte(?:run)?-(.+)-\d+@\d+", told)
    return None if namespace is None else namespace[1]


SOURCE = Source(
    name="Open MPI",
    kind=Kind.PROCESS,
    variables=(
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        _NAMESPACE,
        _URI,
    ),
    read=read,
    hint=f"Start with mpirun -x {ports.COORDINATOR_VARIABLE}=host:{ports.DEFAULT_PORT}",
)


@final
class OpenMPIClusterResolver(EnvironmentResolver):
    """The cluster that Open MPI's ``mpirun`` has started.

    Args:
        environ: The variables; None for this process's own.

    Raises:
        ClusterError: If they are missing or wrong.
    """

    _source = SOURCE
