"""Keras's own variables, ``KERAS_DISTRIBUTION_*``, which `keras.distribution.initialize` reads."""

from __future__ import annotations

from typing import final

from kerasdist.cluster import ports
from kerasdist.cluster.membership import Membership
from kerasdist.cluster.resolver import EnvironmentResolver
from kerasdist.cluster.source import Absent, Kind, Source
from kerasdist.cluster.spec import ClusterSpec
from kerasdist.cluster.tasks import place_of
from kerasdist.cluster.variables import Variables
from kerasdist.errors import ClusterError

_ADDRESSES = "KERAS_DISTRIBUTION_JOB_ADDRESSES"
_COUNT = "KERAS_DISTRIBUTION_NUM_PROCESSES"
_RANK = "KERAS_DISTRIBUTION_PROCESS_ID"


def read(variables: Variables) -> Membership | Absent:
    """Reads Keras's variables.

    The addresses are those of all processes, or of the first alone, which is enough for JAX. A
    framework listens there, so kerasdist uses another port.
    """
    if not variables.has(_RANK):
        return Absent(f"{_RANK} is not set.")
    rank = variables.integer(_RANK)
    # On Cloud TPU the address may be absent: TPU's own variables have it.
    if not variables.has(_ADDRESSES):
        return Absent(f"{_RANK} is set, but not {_ADDRESSES}.")
    entries = [entry.strip() for entry in variables.text(_ADDRESSES).split(",")]
    count = variables.optional_integer(_COUNT)
    count = len(entries) if count is None else count
    if len(entries) not in (1, count):
        raise ClusterError(
            f"Expected the address of each of {count} processes, or of the first alone. Received: "
            f"{_ADDRESSES}={','.join(entries)!r}, {_COUNT}={count}."
        )
    place = place_of(ClusterSpec({"worker": entries}), "worker", 0, _ADDRESSES)
    return Membership(
        task_type="worker",
        task_id=rank,
        rank=rank,
        num_workers=count,
        addresses=place.addresses if len(entries) == count else (),
        coordinator=variables.coordinator(ports.coordinator_of(place.addresses, _ADDRESSES)),
        source=SOURCE.name,
    )


SOURCE = Source(
    name="KERAS_DISTRIBUTION",
    kind=Kind.PROCESS,
    variables=(_ADDRESSES, _COUNT, _RANK),
    read=read,
)


@final
class KerasClusterResolver(EnvironmentResolver):
    """The cluster that ``KERAS_DISTRIBUTION_*`` describes.

    Args:
        environ: The variables; None for this process's own.

    Raises:
        ClusterError: If they are missing or wrong.
    """

    _source = SOURCE
