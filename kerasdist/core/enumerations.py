"""Choices that users make: by a name, by a member of an enumeration, or by an object of options."""

from __future__ import annotations

import enum
from typing import Any, TypeVar

E = TypeVar("E", bound=enum.Enum)
Options = TypeVar("Options")


def member_of(kind: type[E], value: object, argument: str) -> E:
    """Returns the member of an enumeration for its name, or for an equally named member."""
    name: Any = value.name if isinstance(value, enum.Enum) else value
    if isinstance(name, str) and name.upper() in kind.__members__:
        return kind[name.upper()]
    raise ValueError(
        f"Expected {argument} to be one of {list(kind.__members__)}, by name or as a member of "
        f"kerasdist.{kind.__name__}. Received: {argument}={value!r}."
    )


def options_of(kind: type[Options], value: object, argument: str) -> Options:
    """Returns the given options, the defaults for None."""
    if value is None:
        return kind()
    if not isinstance(value, kind):
        raise TypeError(
            f"Expected {argument} to be kerasdist.{kind.__name__} or None. Received: "
            f"{argument}={value!r:.200} of type {type(value).__name__}."
        )
    return value
