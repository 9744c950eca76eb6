"""Which worker holds the others up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

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
