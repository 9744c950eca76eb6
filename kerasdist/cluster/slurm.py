"""Slurm: a step that ``srun`` has started."""

from __future__ import annotations

from typing import final

from kerasdist.cluster import hosts, ports
from kerasdist.cluster.membership import Membership
from kerasdist.cluster.resolver import EnvironmentResolver
from kerasdist.cluster.source import Absent, Kind, Source
from kerasdist.cluster.variables import Variables

# Slurm numbers the steps that no `srun` has started from the end of 32 bits downwards: the script
# of sbatch, the shell of salloc.
_FIRST_SPECIAL_STEP = 0xFFFF_FFF0


def read(variables: Variables) -> Membership | Absent:
    """Reads Slurm's variables.

    Rank 0 is on the first node of the step, with every distribution of tasks but ``arbitrary``. The
    nodes of the other ranks depend on the distribution, so no addresses are given.
    """
    if not variables.has("SLURM_JOB_ID"):
        return Absent("SLURM_JOB_ID is not set.")
    if not variables.has("SLURM_STEP_ID", "SLURM_PROCID"):
        return Absent("This process is in a Slurm job, but in no step: srun has not started it.")
    step = variables.integer("SLURM_STEP_ID")
    if step >= _FIRST_SPECIAL_STEP:
        return Absent("This process is in the shell of a Slurm job: srun has not started it.")
    rank = variables.integer("SLURM_PROCID")
    # In a step SLURM_NTASKS is the step's, unless a script has overwritten it.
    count = variables.optional_integer("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    count = variables.integer("SLURM_NTASKS") if count is None else count
    if count == 1:
        return Absent("This Slurm step has one task.")
    name = "SLURM_STEP_NODELIST" if variables.has("SLURM_STEP_NODELIST") else "SLURM_JOB_NODELIST"
    first = hosts.expand(variables.text(name), name)[0]
    port = ports.of_job(variables.integer("SLURM_JOB_ID"), step)
    return Membership(
        task_type="worker",
        task_id=rank,
        rank=rank,
        num_workers=count,
        addresses=(),
        coordinator=variables.coordinator(ports.join(first, port)),
        source=SOURCE.name,
        local_rank=variables.optional_integer("SLURM_LOCALID"),
        local_workers=_local_workers(variables),
    )


def _local_workers(variables: Variables) -> int | None:
    names = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    text, node = variables.optional_text(*names), variables.optional_integer("SLURM_NODEID")
    if text is None or node is None:
        return None
    by_node = hosts.counts(text, names[0])
    return by_node[node] if node < len(by_node) else None


SOURCE = Source(
    name="Slurm",
    kind=Kind.PLACE,
    variables=(
        "SLURM_JOB_ID",
        "SLURM_STEP_ID",
        "SLURM_PROCID",
        "SLURM_NTASKS",
        "SLURM_STEP_NUM_TASKS",
        "SLURM_JOB_NODELIST",
        "SLURM_STEP_NODELIST",
        "SLURM_LOCALID",
        "SLURM_NODEID",
        "SLURM_TASKS_PER_NODE",
        "SLURM_STEP_TASKS_PER_NODE",
    ),
    read=read,
)


@final
class SlurmClusterResolver(EnvironmentResolver):
    """The cluster that is a Slurm step of several tasks.

    Source:
    https://www.tensorflow.org/api_docs/python/tf/distribute/cluster_resolver/SlurmClusterResolver

    Args:
        environ: The variables; None for this process's own.

    Raises:
        ClusterError: If they are missing or wrong.
    """

    _source = SOURCE
