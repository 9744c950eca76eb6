"""Nested tuples, lists and dicts, without Keras.

`keras.tree` cannot be used, because it would also flatten distributed values, and because the
classes that it flattens depend on the backend. In this module everything except a tuple, list or
dict is a leaf.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple


class Arguments(NamedTuple):
    """The arguments of a call, positional and by keyword, as one structure."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def of(cls, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Arguments:
        """Returns the arguments of a user's call, in a new tuple and a new dict."""
        return cls(tuple(args), dict(kwargs or {}))

    def call(self, function: Callable[..., Any], *first: object) -> Any:
        """Calls a function with the positional arguments `first`, followed by these arguments."""
        return function(*first, *self.args, **self.kwargs)


def flatten(structure: object) -> list[Any]:
    """Returns the leaves of a structure; the items of a dict come in the order of insertion."""
    if isinstance(structure, dict):
        structure = structure.values()
    elif not isinstance(structure, list | tuple):
        return [structure]
    return [leaf for one in structure for leaf in flatten(one)]


def pack(structure: object, leaves: Iterable[Any]) -> Any:
    """Returns a structure of the same form with other leaves, in the order of `flatten`."""
    remaining = iter(leaves)
    return map_leaves(lambda _: next(remaining), structure)


def map_leaves(function: Callable[[Any], Any], structure: object) -> Any:
    """Returns a structure of the same form with ``function(leaf)`` at each leaf."""
    if isinstance(structure, dict):
        return _dict_like(structure, {k: map_leaves(function, v) for k, v in structure.items()})
    if isinstance(structure, list | tuple):
        return _sequence_like(structure, [map_leaves(function, one) for one in structure])
    return function(structure)


def transpose(structures: Sequence[Any], merged: Callable[[Sequence[Any]], Any]) -> Any:
    """Merges the replicas' structures, which must have the same form, into one structure.

    For each leaf, `merged` gets the values of all replicas, and returns the value for the result.
    """
    first = structures[0]
    if isinstance(first, dict):
        _check(structures, lambda one: isinstance(one, dict) and one.keys() == first.keys())
        return _dict_like(
            first, {key: transpose([one[key] for one in structures], merged) for key in first}
        )
    if isinstance(first, list | tuple):
        _check(structures, lambda one: type(one) is type(first) and len(one) == len(first))
        columns = zip(*structures, strict=True)
        return _sequence_like(first, [transpose(column, merged) for column in columns])
    _check(structures, lambda one: not isinstance(one, dict | list | tuple))
    return merged(structures)


def _dict_like(original: Any, items: dict[Any, Any]) -> Any:
    if type(original) is dict:
        return items
    # The items are set in a copy of the original, because the constructor of a subclass such as
    # defaultdict takes other arguments than the constructor of dict.
    filled = copy.copy(original)
    for key, value in items.items():
        filled[key] = value
    return filled


def _sequence_like(original: object, items: list[Any]) -> Any:
    if isinstance(original, list):
        return items
    # Named tuples have `_make`, and structseqs such as torch.return_types.max have `n_fields`. An
    # object of any other subclass of tuple becomes a plain tuple, because a subclass such as
    # torch.Size can hold only numbers.
    kind: Any = type(original)
    return getattr(kind, "_make", kind if hasattr(kind, "n_fields") else tuple)(items)


def _check(structures: Sequence[Any], alike: Callable[[Any], bool]) -> None:
    if not all(alike(one) for one in structures):
        raise ValueError(
            f"Expected the same structure from every replica. Received: {list(structures)!r:.300}. "
            "Return the same tuples, lists and dicts on each replica, whichever rows it has."
        )
