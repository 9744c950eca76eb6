"""A table with Keras variables as keys, which cannot be hashed."""

from __future__ import annotations

import weakref
from typing import Any, Generic, TypeVar, final

_Entry = TypeVar("_Entry")


@final
class VariableTable(Generic[_Entry]):
    """Entries by the variable's id; an entry is removed with its variable."""

    def __init__(self) -> None:
        """Starts empty."""
        self._entries: dict[int, tuple[weakref.ref[Any], _Entry]] = {}

    def get(self, variable: Any) -> _Entry | None:
        """Returns a variable's entry, None if it has none."""
        known = self._entries.get(id(variable))
        return known[1] if known is not None and known[0]() is variable else None

    def put(self, variable: Any, entry: _Entry) -> None:
        """Stores a variable's entry, in place of an earlier one."""
        key, entries = id(variable), self._entries
        known = entries.get(key)
        if known is not None and known[0]() is variable:
            entries[key] = known[0], entry
        else:
            entries[key] = weakref.ref(variable, lambda _: entries.pop(key, None)), entry

    def discard(self, variable: Any) -> None:
        """Removes a variable's entry, if it has one."""
        self._entries.pop(id(variable), None)

    def ids(self) -> list[int]:
        """Returns the ids of the variables that have an entry."""
        return list(self._entries)
