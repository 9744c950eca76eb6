"""torchrun, and other launchers that set torch's variables, such as Kubeflow's PyTorchJob."""

from __future__ import annotations

from typing import final

from kerasdist.cluster import ports
from kerasdist.cluster.membership import Membership
from kerasdist.cluster.resolver import EnvironmentResolver
from kerasdist.cluster.source import Absent, Kind, Source
from kerasdist.cluster.variables import Variables


def read(variables: Variables) -> Membership | Absent:
    """Reads torch's variables.

    torchrun's agent listens at ``MASTER_PORT``, so kerasdist uses another port.
    """
    # RANK alone is a common name; the four together are torch's.
    if not variables.has("RANK", "WORLD_SIZE"):
        return Absent("RANK and WORLD_SIZE are not both set.")
    if not variables.has("MASTER_ADDR"):
        return Absent("RANK and WORLD_SIZE are set, but not MASTER_ADDR.")
    rank = variables.integer("RANK")
    port = variables.integer("MASTER_PORT")
    master = ports.join(variables.text("MASTER_ADDR"), port)
    return Membership(
        task_type="worker",
        task_id=rank,
        rank=rank,
        num_workers=variables.integer("WORLD_SIZE"),
        addresses=(),
        coordinator=variables.coordinator(
            ports.coordinator_of([master], "MASTER_ADDR:MASTER_PORT")
        ),
        source=SOURCE.name,
        local_rank=variables.optional_integer("LOCAL_RANK"),
        local_workers=variables.optional_integer("LOCAL_WORLD_SIZE"),
    )


SOURCE = Source(
    name="torchrun",
    kind=Kind.PROCESS,
    variables=(
        "RANK",
        "WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
    ),
    read=read,
)


@final
class TorchrunClusterResolver(EnvironmentResolver):
    """The cluster that torchrun's variables describe.

    Args:
        environ: The variables; None for this process's own.

    Raises:
        ClusterError: If they are missing or wrong.
    """

    _source = SOURCE
