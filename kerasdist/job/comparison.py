"""Compares workers' facts, and the shapes of their batches, and describes the differences.

No step waits for the comparison of batches, because heartbeats carry the shapes to the chief.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any, TypeVar, cast, final

Value = TypeVar("Value", bound=Hashable)

# The largest number of characters that a message shows of a value.
_SHOWN = 200

# How many differences a message names besides the first one, which it shows with its values.
_MORE = 4

NAMED = 8
"""The largest number of workers, or of groups of workers, that a message names."""

# If only some workers have a value, messages show this text as the value of the other workers.
_NOTHING = "nothing"


def groups(values: Iterable[tuple[int, Value]]) -> dict[Value, list[int]]:
    """Returns the ranks of the workers that have each value, from pairs of rank and value."""
    ranks: dict[Value, list[int]] = {}
    for rank, value in values:
        ranks.setdefault(value, []).append(rank)
    return ranks


def digest(facts: object) -> str:
    """Returns a digest that is equal for equal facts, whatever the order of their names."""
    return hashlib.sha256(_text(facts).encode()).hexdigest()


def described_difference(
    everyone: Sequence[object], workers: Sequence[Sequence[int]] | None = None
) -> str:
    """Returns a text about the first fact that is not equal on all workers.

    The text says which workers have which value. With three or more workers, the value that most of
    them have comes last.

    Args:
        everyone: The facts, of at least two workers.
        workers: For each item of `everyone`, the ranks of the workers that have these facts. More
            lists may follow, with the ranks of workers whose facts are not known. None: there is
            one item for each worker, by rank.
    """
    workers = [[rank] for rank in range(len(everyone))] if workers is None else workers
    flat = [dict(_leaves(facts)) for facts in everyone]
    names = dict.fromkeys(name for facts in flat for name in facts)
    apart = [name for name in names if len({facts.get(name, _NOTHING) for facts in flat}) > 1]
    values = [facts.get(apart[0], _NOTHING) for facts in flat]
    have = groups(
        (rank, value) for value, ranks in zip(values, workers, strict=False) for rank in ranks
    )
    # If several values are equally frequent, `max` returns the value of the lowest rank.
    most = max(have, key=lambda value: len(have[value]))
    shown = [*[value for value in have if value != most][:NAMED], most]
    said = ", ".join(f"{_shown(value)} on {named_workers(have[value])}" for value in shown)
    hidden = sum(map(len, workers)) - sum(len(have[value]) for value in shown)
    if hidden:
        said += f", other values on {hidden} more"
    more = ", ".join(apart[1 : 1 + _MORE])
    return f"{apart[0]}={said}" + (f" (further differences: {more})" if more else "")


def first_of(items: Sequence[str], most: int = NAMED) -> str:
    """Returns a text with the first `most` items, and with the number of the other items."""
    more = f"; and {len(items) - most} others" if len(items) > most else ""
    return "; ".join(items[:most]) + more


def named_workers(ranks: Sequence[int]) -> str:
    """Returns text such as ``workers 0, 1, ..., 7 and 5 others``: it names at most `NAMED`."""
    named = ", ".join(map(str, sorted(ranks)[:NAMED]))
    more = len(ranks) - NAMED
    noun = "worker" if len(ranks) == 1 else "workers"
    return f"{noun} {named}" + (f" and {more} others" if more > 0 else "")


def named_places(places: Mapping[int, str]) -> str:
    """Returns text about what workers do: ``worker 0 is at 'a'; workers 1, 2 are ...``."""
    there = groups((rank, places[rank]) for rank in sorted(places))
    said = [
        f"{named_workers(ranks)} {'is' if len(ranks) == 1 else 'are'} {place}"
        for place, ranks in there.items()
    ]
    hidden = sum(map(len, list(there.values())[NAMED:]))
    return "; ".join(said[:NAMED]) + (f"; {hidden} others are elsewhere" if hidden else "")


def _text(facts: object) -> str:
    return json.dumps(facts, sort_keys=True)


def _leaves(facts: object, path: str = "") -> Iterator[tuple[str, str]]:
    """Yields the path and the JSON text of each value in facts."""
    if isinstance(facts, Mapping) and facts:
        for name, inner in cast("Mapping[str, Any]", facts).items():
            yield from _leaves(inner, f"{path}.{name}" if path else name)
    elif isinstance(facts, list) and facts:
        for index, inner in enumerate(cast("list[Any]", facts)):
            yield from _leaves(inner, f"{path}[{index}]")
    else:
        yield path, _text(facts)


def _shown(text: str) -> str:
    value = text if text == _NOTHING else repr(json.loads(text))
    return value if len(value) <= _SHOWN else f"{value[:_SHOWN]}..."


@final
class BatchHistory:
    """The forms (shapes and types) of the batches since workers last compared batches.

    `add` compares a form only with the form of the step before. Another thread may call `report` at
    any time.

    Args:
        count_begun: None if `add` is called when a step begins. If `add` is called only when a step
            ends: a function that returns how many batches have been read so far.
    """

    def __init__(self, count_begun: Callable[[], int] | None = None) -> None:
        self._count_begun = count_begun
        self._stretch = _Stretch(0, 0)

    def add(self, form: Hashable) -> None:
        """Records the form (shapes and types) of the batch of one more step."""
        stretch = self._stretch
        if form != stretch.form or not stretch.steps:
            stretch.form = form
            stretch.changes.append((stretch.steps, str(form)))
        stretch.steps += 1  # set last, so that a report has the form of each step that it counts

    def end(self) -> dict[str, Any]:
        """Records that no step follows before the next call of `clear`, and returns the report."""
        self._stretch.ended = True
        return self.report()

    def report(self) -> dict[str, Any]:
        """Returns the report, as JSON, on the batches since the last call of `clear`."""
        stretch = self._stretch
        # `ended` is read before `steps`. So if it is True, no step is missing in `steps`.
        ended = stretch.ended
        steps, changes = stretch.steps, stretch.changes[:]
        begun = steps if self._count_begun is None else self._count_begun() - stretch.begun_before
        found = {"stretch": stretch.number, "steps": steps, "begun": begun, "changes": changes}
        return {**found, "ended": ended}

    def clear(self) -> None:
        """Forgets all earlier batches, so that the next report covers only later ones."""
        begun = 0 if self._count_begun is None else self._count_begun()
        self._stretch = _Stretch(self._stretch.number + 1, begun)


@final
class _Stretch:
    """The steps between two comparisons of the workers' batches, and the forms of these batches."""

    def __init__(self, number: int, begun_before: int) -> None:
        self.number = number
        self.begun_before = begun_before
        self.steps = 0
        self.ended = False
        self.form: Hashable = None
        # For each step whose batch has another form than the batch of the step before, and for the
        # first step: the step's number, from 0, and the form.
        self.changes: list[tuple[int, str]] = []


Report = Mapping[str, Any]
"""A worker's report on its batches, as `BatchHistory.report` returns it."""

# A difference ends the job only after this many further steps. If the epoch ends before that, the
# comparison at the end of the epoch raises an error, which a script can handle. But workers may
# wait for each other in collectives of different programs, and never come to the end of the epoch.
# So the coordinator then ends the job.
STEPS_BEYOND = 20

# A worker whose batches change their form more often than this is compared only at the epoch's end.
MAX_CHANGES = 64


# The advice at the end of a message about workers whose batches differ.
ADVICE = (
    "All workers read the same data, and each takes its rows of every batch. If each worker has "
    "data of its own, pass a dataset with InputOptions(auto_shard_policy=AutoShardPolicy.OFF)"
)


def check_report(report: Report) -> None:
    """Raises TypeError or ValueError if a report lacks the form that `came_apart` expects."""
    steps = [at for at, form in report["changes"] if isinstance(form, str)]
    numbers = [report["stretch"], report["steps"], report["begun"], *steps]
    if any(type(number) is not int for number in numbers):
        raise TypeError(f"batches={report!r}")
    if len(steps) < len(report["changes"]) or (report["steps"] and steps[:1] != [0]):
        raise ValueError(f"batches={report!r}")


def came_apart(reports: Sequence[Report | None], *, idle: bool = False) -> str | None:
    """Describes the first batch that differs between workers; returns None if none differs.

    `idle`: whether no worker makes progress, so that it is useless to wait for further steps.
    """
    known = [one for one in reports if one is not None]
    if len(known) < len(reports) or len({one["stretch"] for one in known}) > 1:
        return None
    steps = min(one["steps"] for one in known) - (0 if idle else STEPS_BEYOND)
    changes = [tuple((at, form) for at, form in one["changes"] if at < steps) for one in known]
    kinds = set(changes)
    had_by = Counter(change for kind in kinds for change in kind)
    apart = [at for (at, _), count in had_by.items() if count < len(kinds)]
    if apart:
        first = min(apart)
        forms = [next(form for at, form in reversed(one) if at <= first) for one in changes]
        return described_difference([{f"batch {first + 1}": form} for form in forms])
    ended = min((one["begun"] for one in known if one.get("ended")), default=None)
    if ended is None or ended == max(one["begun"] for one in known):
        return None
    # One worker waits in the next step, and another worker at the end of the epoch.
    places = [_place(one, ended) for one in known]
    return described_difference([{f"batch {ended + 1}": place} for place in places])


def _place(report: Report, ended: int) -> str:
    if report["begun"] > ended:
        return f"trains on batch {report['begun']}"
    return "none, at the end of its data" if report.get("ended") else "not read yet"


# The times by which `slowest` compares workers. If the first time is known for all workers, the
# second is not used. `own_ms` is the time of a step without waits for other workers, and `data_ms`
# is the time that the step waited for data.
_BY = ("own_ms", "data_ms")


def slowest(workers: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Returns which worker is the slowest, and how much slower it is than the others.

    Args:
        workers: By rank, ``own_ms`` and ``data_ms``: the time of a step without waits for other
            workers, and the time that the step waited for data; None if a time is not known.

    Returns:
        The slowest worker's rank, the name of the time that was compared, this worker's time, and
        the median of the others' times. None if there is no other worker, or if neither time is
        known for every worker.
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
