"""How far the clocks of the workers' machines are apart."""

from __future__ import annotations

import platform
import time
from dataclasses import dataclass
from statistics import median
from typing import final

from kerasdist.job.job import Job

_ROUNDS = 11


@final
@dataclass(frozen=True)
class Offset:
    """What to subtract from a worker's clock to get the chief's.

    Attributes:
        microseconds: The difference.
        spread: How far apart the middle half of the measurements was.
    """

    microseconds: float
    spread: float


def offset(job: Job | None) -> Offset:
    """Measures the offset of this worker's clock. All workers must call it.

    Workers of one machine have one clock. Others meet several times: the coordinator lets all go
    on at once, and each looks at its clock then. The median of the differences is off by the
    difference of the times that a message takes to two workers, less than the network's latency.
    """
    if job is None or not any(job.compare_objects("machines", platform.node())):
        return Offset(0.0, 0.0)
    stamps: list[int] = []
    for number in range(_ROUNDS):
        job.all_gather_object(f"clock {number}", None, channel="clock")
        stamps.append(time.time_ns())
    chiefs = job.broadcast_object("clocks", stamps, channel="clock")
    return of_stamps(stamps, chiefs)


def of_stamps(own: list[int], chiefs: list[int]) -> Offset:
    """Returns the offset, from the times (ns) at which two workers went on after each meeting."""
    differences = sorted((mine - theirs) / 1e3 for mine, theirs in zip(own, chiefs, strict=True))
    quarter = len(differences) // 4
    spread = differences[-1 - quarter] - differences[quarter]
    return Offset(median(differences), spread)
