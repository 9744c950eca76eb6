"""The process management interface: ``mpirun`` of MPICH, Intel MPI, MVAPICH, Cray."""

from __future__ import annotations

import zlib
from typing import final

from kerasdist.cluster import ports
from kerasdist.cluster.membership import Membership
from kerasdist.cluster.resolver import EnvironmentResolver
from kerasdist.cluster.source import Absent, Kind, Source
from kerasdist.cluster.variables import Variables

_LOCAL_RANK = ("MPI_LOCALRANKID", "PALS_LOCAL_RANKID", "PMI_LOCAL_RANK")
_LOCAL_WORKERS = ("MPI_LOCALNRANKS", "PALS_LOCAL_SIZE", "PMI_LOCAL_SIZE")
_JOB = ("I_MPI_HYDRA_UUID", "PALS_APID", "PMI_JOBID")


def read(variables: Variables) -> Membership | Absent:
    """Reads the variables.

    They do not name rank 0's machine, which matters only if ranks are on several machines.
    """
    if not variables.has("PMI_RANK", "PMI_SIZE"):
        return Absent("PMI_RANK and PMI_SIZE are not both set.")
    rank, count = variables.integer("PMI_RANK"), variables.integer("PMI_SIZE")
    local_workers = variables.optional_integer(*_LOCAL_WORKERS)
    job = variables.optional_text(*_JOB)
    port = ports.DEFAULT_PORT if job is None else ports.of_job(zlib.crc32(job.encode()))
    coordinator = variables.coordinator(
        ports.join("127.0.0.1", port) if local_workers == count else None
    )
    return Membership(
        task_type="worker",
        task_id=rank,
        rank=rank,
        num_workers=count,
        addresses=(),
        coordinator=coordinator,
        source=SOURCE.name,
        local_rank=variables.optional_integer(*_LOCAL_RANK),
        local_workers=local_workers,
    )


SOURCE = Source(
    name="PMI",
    kind=Kind.PROCESS,
    variables=("PMI_RANK", "PMI_SIZE", *_LOCAL_RANK, *_LOCAL_WORKERS, *_JOB),
    read=read,
    hint=f"Start with mpirun -genv {ports.COORDINATOR_VARIABLE} host:{ports.DEFAULT_PORT}",
)


@final
class PMIClusterResolver(EnvironmentResolver):
    """The cluster that the ``mpirun`` of MPICH or one of its family has started.

    Args:
        environ: The variables; None for this process's own.

    Raises:
        ClusterError: If they are missing or wrong.
    """

    _source = SOURCE
