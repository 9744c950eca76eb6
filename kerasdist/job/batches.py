"""Finds workers that train on batches of other sizes, while an epoch runs.

No step waits for that: each sign of life tells the chief the batches of a worker.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kerasdist.job.comparison import described_difference

# How many steps after the first difference the job ends. Before that, the comparison at the end of
# the epoch may report it, after which the script can go on.
STEPS_BEYOND = 20

# A worker whose batches change their form more often does not say so until the epoch ends.
MAX_CHANGES = 64


# Advice at the end of a message.
ADVICE = (
    "All workers read the same data, and each takes its rows of every batch. If each worker has "
    "data of its own, pass a dataset with InputOptions(auto_shard_policy=AutoShardPolicy.OFF)"
)


def came_apart(reports: Sequence[Mapping[str, Any] | None]) -> str | None:
    """Describes the first batch that differs between workers; None if none does."""
    known = [one for one in reports if one is not None]
    if len(known) < len(reports) or len({one["stretch"] for one in known}) > 1:
        return None
    ended = min((one["steps"] for one in known if one.get("ended")), default=None)
    if ended is not None and ended < max(one["steps"] for one in known):
        # The one waits for the next step, in a collective, the other for the end of the epoch.
        places = [_place(one, ended) for one in known]
        return described_difference([{f"batch {ended + 1}": place} for place in places])
    steps = min(one["steps"] for one in known) - STEPS_BEYOND
    changes = [{at: form for at, form in one["changes"] if at < steps} for one in known]
    apart = [at for one in changes for at in one if len({two.get(at) for two in changes}) > 1]
    if not apart:
        return None
    first = min(apart)
    forms = [next(two[at] for at in sorted(two, reverse=True) if at <= first) for two in changes]
    return described_difference([{f"batch {first + 1}": form} for form in forms])


def _place(report: Mapping[str, Any], ended: int) -> str:
    if report["steps"] > ended:
        return f"trains on batch {report['steps']}"
    return "none, at the end of its data" if report.get("ended") else "not read yet"
