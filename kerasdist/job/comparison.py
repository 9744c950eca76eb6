"""What workers compare: facts as JSON, their digest, and the first places where they differ."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

# How much of a value a message shows.
_SHOWN = 200

# How many more places a message names.
_MORE = 4

# What a message shows for a worker that lacks a value that another one has.
_NOTHING = "nothing"


def digest(facts: Any) -> str:
    """Returns a digest that is equal for equal facts, whatever the order of their names."""
    return hashlib.sha256(_text(facts).encode()).hexdigest()


def described_difference(everyone: Sequence[Any]) -> str:
    """Returns in words where the facts of workers differ first, and who has what there.

    With three workers or more the value that most of them have comes last, after the others'.
    """
    flat = [dict(_leaves(facts)) for facts in everyone]
    names = dict.fromkeys(name for facts in flat for name in facts)
    apart = [name for name in names if len({facts.get(name, _NOTHING) for facts in flat}) > 1]
    values = [facts.get(apart[0], _NOTHING) for facts in flat]
    # A tie goes to the value of the lowest rank.
    [(most, _)] = Counter(values).most_common(1)
    others = [value for value in dict.fromkeys(values) if value != most]
    said = ", ".join(
        f"{_shown(value)} on {_workers(rank for rank, own in enumerate(values) if own == value)}"
        for value in (*others, most)
    )
    more = ", ".join(apart[1 : 1 + _MORE])
    return f"{apart[0]}={said}" + (f" (further differences: {more})" if more else "")


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


def _workers(ranks: Iterator[int]) -> str:
    numbers = [str(rank) for rank in ranks]
    return f"worker{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}"
