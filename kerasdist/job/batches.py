"""Finds workers that train on batches of other sizes, while an epoch runs.

No step waits for that: each sign of life tells the chief the batches of a worker.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from kerasdist.job.comparison import described_difference

# How many steps after the first difference the job ends. Before that, the comparison at the end of
# the epoch may report it, after which the script can go on; it cannot if workers wait for each
# other, in the collectives of programs that differ.
STEPS_BEYOND = 20

# A worker whose batches change their form more often does not say so until the epoch ends.
MAX_CHANGES = 64


# Advice at the end of a message.
ADVICE = (
    "All workers read the same data, and each takes its rows of every batch. If each worker has "
    "data of its own, pass a dataset with InputOptions(auto_shard_policy=AutoShardPolicy.OFF)"
)


def check_report(report: Any) -> None:
    """Raises TypeError or ValueError if a report is not of the form that `came_apart` reads."""
    steps = [at for at, form in report["changes"] if isinstance(form, str)]
    numbers = [report["stretch"], report["steps"], _begun(report), *steps]
    if any(type(number) is not int for number in numbers):
        raise TypeError(f"batches={report!r}")
    if len(steps) < len(report["changes"]) or (report["steps"] and steps[:1] != [0]):
        raise ValueError(f"batches={report!r}")


def came_apart(reports: Sequence[Mapping[str, Any] | None], *, idle: bool = False) -> str | None:
    """Describes the first batch that differs between workers; None if none does.

    `idle`: whether no worker goes on, so that no further steps will come.
    """
    known = [one for one in reports if one is not None]
    if len(known) < len(reports) or len({one["stretch"] for one in known}) > 1:
        return None
    ended = min((_begun(one) for one in known if one.get("ended")), default=None)
    if ended is not None and ended < max(_begun(one) for one in known):
        # The one waits for the next step, in a collective, the other for the end of the epoch.
        places = [_place(one, ended) for one in known]
        return described_difference([{f"batch {ended + 1}": place} for place in places])
    steps = min(one["steps"] for one in known) - (0 if idle else STEPS_BEYOND)
    changes = [tuple((at, form) for at, form in one["changes"] if at < steps) for one in known]
    kinds = set(changes)
    had_by = Counter(change for kind in kinds for change in kind)
    apart = [at for (at, _), count in had_by.items() if count < len(kinds)]
    if not apart:
        return None
    first = min(apart)
    forms = [next(form for at, form in reversed(one) if at <= first) for one in changes]
    return described_difference([{f"batch {first + 1}": form} for form in forms])


def _place(report: Mapping[str, Any], ended: int) -> str:
    if _begun(report) > ended:
        return f"trains on batch {_begun(report)}"
    return "none, at the end of its data" if report.get("ended") else "not read yet"


def _begun(report: Mapping[str, Any]) -> int:
    """Returns how many batches steps have read, where these are not counted before a step."""
    return report.get("begun", report["steps"])


# The figures that show it, the better one first: a step's time without waits for other workers, and
# its wait for data.
_BY = ("own_ms", "data_ms")


def slowest(workers: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Returns which worker is the slowest, and how much slower than the others it is.

    Args:
        workers: By rank, ``own_ms`` and ``data_ms``: the time of a step in which the worker did not
            wait for the others, and in which it waited for data; None where it is not known.

    Returns:
        Its rank, by which of these times, that time, and the median of the others' times. None if
        there is no other worker, or no time is known of all.
    """
    for name in _BY:
        times = [one.get(name) for one in workers]
        known = [time for time in times if time is not None]
        if len(known) < max(2, len(times)):
            continue
        rank = max(range(len(known)), key=known.__getitem__)
        others = median(known[:rank] + known[rank + 1 :])
        return {"worker": rank, "by": name, "ms": known[rank], "others_ms": others}
    return None
