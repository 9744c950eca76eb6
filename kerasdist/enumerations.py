"""Choices that users make by a name or by a member of an enumeration."""

from __future__ import annotations

import enum
from typing import Any, TypeVar

E = TypeVar("E", bound=enum.Enum)


def member_of(kind: type[E], value: Any, argument: str) -> E:
    """Returns the member of an enumeration that is meant.

    Args:
        kind: The enumeration; its values are its names.
        value: A member, its name in any case, or a member of another enumeration, such as
            TensorFlow's, with this name.
        argument: The argument's name, for the message.

    Raises:
        ValueError: If it is none of these.
    """
    name: Any = value.name if isinstance(value, enum.Enum) else value
    if isinstance(name, str) and name.upper() in kind.__members__:
        return kind[name.upper()]
    raise ValueError(
        f"Expected {argument} to be one of {list(kind.__members__)}, by name or as a member of "
        f"kerasdist.{kind.__name__}. Received: {argument}={value!r}."
    )
