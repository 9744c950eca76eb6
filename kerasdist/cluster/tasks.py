"""The rank of a task of a cluster, as ``TF_CONFIG`` counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from kerasdist.cluster import ports
from kerasdist.cluster.spec import ClusterSpec
from kerasdist.errors import ClusterError, UnsupportedError

_INSTEAD = {
    "ps": "kerasdist has no parameter servers: every worker holds the variables. Give a cluster of "
    "chief and workers to a strategy for several workers.",
    "evaluator": "kerasdist evaluates on the workers: give validation_data to fit, or start a "
    "process outside of the cluster that loads the checkpoints and calls evaluate.",
}


@final
@dataclass(frozen=True)
class Place:
    """A task's rank, and the addresses of all ranks."""

    rank: int
    addresses: tuple[str, ...]


def place_of(cluster: ClusterSpec, task_type: str, task_id: int, source: str) -> Place:
    """Returns the rank of a task: the chief first, then the workers."""
    refused = task_type if task_type in _INSTEAD else "ps" if "ps" in cluster.jobs else None
    if refused is not None:
        raise UnsupportedError(
            f"Expected a cluster of chief and workers, from {source}. Received: "
            f"task_type={task_type!r}, jobs={cluster.jobs}. {_INSTEAD[refused]}"
        )
    unknown = sorted({task_type, *cluster.jobs} - {"chief", "worker", "evaluator"})
    if unknown:
        raise ClusterError(
            f"Expected tasks of the types 'chief' and 'worker', from {source}. Received: "
            f"task_type={task_type!r}, jobs={cluster.jobs}. Rename {unknown[0]!r}."
        )
    sizes = {job: cluster.num_tasks(job) for job in ("chief", "worker") if job in cluster.jobs}
    if sizes.get("chief", 0) > 1:
        raise ClusterError(
            f"Expected one chief at most, from {source}. Received: chief="
            f"{cluster.job_tasks('chief')}. Make the others workers."
        )
    if not 0 <= task_id < sizes.get(task_type, 0):
        raise ClusterError(
            f"Expected this process's task to be in the cluster, from {source}. Received: "
            f"task_type={task_type!r}, task_id={task_id}, cluster={cluster.as_dict()}."
        )
    addresses = tuple(
        cluster.task_address(job, index) for job, size in sizes.items() for index in range(size)
    )
    for address in addresses:
        ports.split(address, source)
    repeated = sorted({address for address in addresses if addresses.count(address) > 1})
    if repeated:
        raise ClusterError(
            f"Expected every task at an address of its own, from {source}. "
            f"Received: {repeated[0]!r} more than once, in cluster={cluster.as_dict()}."
        )
    return Place(task_id + (sizes.get("chief", 0) if task_type == "worker" else 0), addresses)
