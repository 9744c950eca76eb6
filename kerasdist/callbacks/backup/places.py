"""The places in a source of data, from which another process goes on without reading it again.

Iterators over ``tf.data`` pipelines and Grain's know their place, and so do loaders that have
``state_dict`` and ``load_state_dict``. Keras's loops may read ahead of the steps. So where Python
reads, places are kept as batches pass, after those at which a backup may be made.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from kerasdist import keras_compat
from kerasdist.callbacks.backup.encoding import Encoder, Remembering, decode, renumbered


@final
@dataclass(frozen=True)
class Place:
    """A place in a source, in the form that a backup keeps.

    Attributes:
        count: After how many batches of the iteration it is.
        forms: Forms of the place, and of what has changed of a loader's parts, such as its dataset.
        arrays: The arrays that the forms name, from number 0.
        lost: Place and type of each value that cannot be kept.
    """

    count: int
    forms: Sequence[Any]
    arrays: Sequence[np.ndarray]
    lost: Mapping[str, str]

    def kept(self, arrays: list[np.ndarray]) -> dict[str, Any]:
        """Returns the form for a file, and adds its arrays to those of the file."""
        forms = renumbered(self.forms, len(arrays))
        arrays += self.arrays
        return {"count": self.count, "forms": forms}


@final
class Places:
    """The places of the newest iteration over a source.

    Each iteration over a ``tf.data`` pipeline draws the seeds of its shuffles when it begins. So
    the place between two epochs is the beginning of the next one: that iterator is made ahead, and
    used when Keras asks for it.
    """

    def __init__(
        self,
        source: Any,
        parts: Remembering,
        is_due: Callable[[int], bool],
        *,
        read_by_python: bool,
    ) -> None:
        """Takes a source.

        Args:
            source: The source.
            parts: Its parts, which may change without its knowledge.
            is_due: Returns whether the place after so many batches is of use.
            read_by_python: Whether Python reads it; else steps in TensorFlow's graphs, not ahead.
        """
        self._source = source
        self._is_due = is_due
        self._read_by_python = read_by_python
        self._parts = parts
        self._kept: list[Place] = []
        self._make: Callable[[], Any] | None = None
        self._last: Any = None
        self._ahead: Any = None
        self._to: tuple[Mapping[str, Any], Sequence[Any]] | None = None

    @property
    def lost(self) -> list[str]:
        """What a backup cannot keep of a place, a line each."""
        return [f"{where} ({kind})" for one in self._kept[-1:] for where, kind in one.lost.items()]

    def begun(self, make: Callable[[], Any]) -> Any:
        """Returns an iterator from the beginning, or from the place of `go_to`."""
        self._make = make
        ahead, self._ahead = self._ahead, None
        to, self._to = self._to, None
        first = make if ahead is None else lambda: ahead
        count = 0
        if to is None:
            self._last = first()
        else:
            form, arrays = to
            count, (place, parts) = int(form["count"]), form["forms"]
            self._last = keras_compat.begun_at(self._source, first, decode(place, arrays))
            self._parts.put_back(parts, arrays)
        self._kept = [self._now(self._last, count)]
        return self._followed(self._last, count) if self._read_by_python else self._last

    def _followed(self, iterator: Any, count: int) -> Iterator[Any]:
        for batch in iterator:
            count += 1
            if self._last is iterator and self._is_due(count):
                self._kept.append(self._now(iterator, count))
            yield batch

    def newest(self, count: int) -> Place | None:
        """Returns the last place that is not behind so many batches; forgets those before it."""
        if not self._read_by_python and self._last is not None and self._is_due(count):
            return self._now(self._last, count)
        there = [one for one in list(self._kept) if one.count <= count]
        del self._kept[: max(len(there) - 1, 0)]
        return there[-1] if there else None

    def next(self) -> Place | None:
        """Returns where the next iteration begins, None where each begins alike."""
        if self._make is None or not keras_compat.is_tf_dataset(self._source):
            return None
        if self._ahead is None:
            self._ahead = self._make()
        return self._now(self._ahead, 0)

    def go_to(self, form: Mapping[str, Any], arrays: Sequence[Any]) -> int:
        """Lets the next iteration go on from a place; returns after how many batches it is."""
        self._to = form, arrays
        return int(form["count"])

    def _now(self, iterator: Any, count: int) -> Place:
        encoder = Encoder()
        place = copy.deepcopy(keras_compat.place_of(self._source, iterator))
        form = encoder.encode(place, "the place in the data")
        parts, arrays = self._parts.state(len(encoder.arrays))
        copies = [array.copy() for array in arrays]
        return Place(count, [form, parts], [*encoder.arrays, *copies], encoder.lost)
