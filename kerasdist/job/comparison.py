"""What workers compare: facts as JSON, their digest, and the first places where they differ."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

# How much of a value a message shows.
_SHOWN = 200

# How many more places a message names.
_MORE = 4

NAMED = 8
"""How many workers, or groups of workers, a message names."""

# What a message shows for a worker that lacks a value that another one has.
_NOTHING = "nothing"


def groups(values: Iterable[tuple[int, Any]]) -> dict[Any, list[int]]:
    """Returns which workers have each value, from ranks and values."""
    ranks: dict[Any, list[int]] = {}
    for rank, value in values:
        ranks.setdefault(value, []).append(rank)
    return ranks


def digest(facts: Any) -> str:
    """Returns a digest that is equal for equal facts, whatever the order of their names."""
    return hashlib.sha256(_text(facts).encode()).hexdigest()


def described_difference(
    everyone: Sequence[Any], workers: Sequence[Sequence[int]] | None = None
) -> str:
    """Returns in words where the facts of workers differ first, and who has what there.

    With three workers or more the value that most of them have comes last, after the others'.

    Args:
        everyone: The facts, of at least two workers.
        workers: The ranks of the workers that have each of these facts, which may be followed by
            those of workers whose facts are not known; None: one worker has each.
    """
    workers = [[rank] for rank in range(len(everyone))] if workers is None else workers
    flat = [dict(_leaves(facts)) for facts in everyone]
    names = dict.fromkeys(name for facts in flat for name in facts)
    apart = [name for name in names if len({facts.get(name, _NOTHING) for facts in flat}) > 1]
    values = [facts.get(apart[0], _NOTHING) for facts in flat]
    have = groups(
        (rank, value) for value, ranks in zip(values, workers, strict=False) for rank in ranks
    )
    # A tie goes to the value of the lowest rank.
    most = max(have, key=lambda value: len(have[value]))
    shown = [*[value for value in have if value != most][:NAMED], most]
    said = ", ".join(f"{_shown(value)} on {named_workers(have[value])}" for value in shown)
    hidden = sum(map(len, workers)) - sum(len(have[value]) for value in shown)
    if hidden:
        said += f", other values on {hidden} more"
    more = ", ".join(apart[1 : 1 + _MORE])
    return f"{apart[0]}={said}" + (f" (further differences: {more})" if more else "")


def named_workers(ranks: Sequence[int]) -> str:
    """Returns the names of workers in a message; of many the first, and how many more there are."""
    named = ", ".join(map(str, sorted(ranks)[:NAMED]))
    more = len(ranks) - NAMED
    return f"worker{'s'[: len(ranks) - 1]} {named}" + (f" and {more} others" if more > 0 else "")


def named_places(places: Mapping[int, str]) -> str:
    """Returns where workers are, in a message: ``worker 0 is at 'a'; workers 1, 2 are ...``."""
    there = groups((rank, places[rank]) for rank in sorted(places))
    said = [
        f"{named_workers(ranks)} {'is' if len(ranks) == 1 else 'are'} {place}"
        for place, ranks in there.items()
    ]
    hidden = sum(map(len, list(there.values())[NAMED:]))
    return "; ".join(said[:NAMED]) + (f"; {hidden} others are elsewhere" if hidden else "")


def _text(facts: Any) -> str:
    return json.dumps(facts, sort_keys=True)


def _leaves(facts: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """The path and the JSON text of each value."""
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
