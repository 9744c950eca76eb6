"""The places in a source of data, from which another process goes on without reading it again.

Iterators over ``tf.data`` pipelines and Grain's know their place, and so do loaders that have
``state_dict`` and ``load_state_dict``. Keras's loops may read ahead of the steps. So where Python
reads, places are kept as batches pass, after those at which a backup may be made.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any, final

from kerasdist import keras_compat
from kerasdist.callbacks.backup.encoding import Encoder, Remembering, decode

Place = Mapping[str, Any]
"""A place in a source, in the form that a backup keeps.

``count``: after how many batches of the iteration; ``forms``: of the place, and of what has changed
of a loader's parts, such as its dataset.
"""


@final
class Places:
    """The places of the newest iteration over a source.

    Each iteration over a ``tf.data`` pipeline draws the seeds of its shuffles when it begins. So
    the place between two epochs is the beginning of the next one: that iterator is made ahead, and
    used when Keras asks for it. A place within an epoch goes with that of the next one, too: once a
    pipeline has read its shuffle to the end, its own place has no seeds any more.
    """

    def __init__(
        self,
        source: object,
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
        self._make: Callable[[], object] | None = None
        self._last: object = None
        self._ahead: object = None
        self._to: Place | None = None
        self._ahead_to: Place | None = None

    def begun(self, make: Callable[[], object]) -> object:
        """Returns an iterator from the beginning, or from the place of `go_to`."""
        self._make = make
        ahead, self._ahead = self._ahead, None
        to, self._to = self._to, None
        first = make if ahead is None else lambda: ahead
        count = 0
        if to is None:
            self._last = first()
        else:
            count, (place, parts) = to["count"], to["forms"]
            self._last = keras_compat.begun_at(self._source, first, decode(place))
            self._parts.put_back(parts)
        if self._ahead_to is not None:
            [place, _], self._ahead_to = self._ahead_to["forms"], None
            self._ahead = keras_compat.begun_at(self._source, make, decode(place))
        self._kept = self._now(self._last, count)
        return self._followed(self._last, count) if self._read_by_python else self._last

    def _followed(self, iterator: Any, count: int) -> Iterator[object]:
        for batch in iterator:
            count += 1
            if self._last is iterator and self._is_due(count):
                self._kept += self._now(iterator, count)
            yield batch

    def newest(self, count: int) -> Place | None:
        """Returns the last place that is not behind so many batches; forgets those before it."""
        if not self._read_by_python and self._last is not None and self._is_due(count):
            self._kept = self._now(self._last, count)
        there = [one for one in list(self._kept) if one["count"] <= count]
        del self._kept[: max(len(there) - 1, 0)]
        return there[-1] if there else None

    def next(self) -> Place | None:
        """Returns where the next iteration begins, None where each begins alike."""
        if self._make is None or not keras_compat.is_tf_dataset(self._source):
            return None
        if self._ahead is None:
            self._ahead = self._make()
        return next(iter(self._now(self._ahead, 0)), None)

    def go_to(self, place: Place, following: Place | None) -> None:
        """Lets the next iteration go on from a place.

        `following` is the place of the iteration after it, None where each begins alike.
        """
        self._to, self._ahead_to = place, following

    def _now(self, iterator: object, count: int) -> list[Place]:
        """Returns where an iterator is, nothing if that has values which no backup can keep."""
        encoder = Encoder()
        place = keras_compat.place_of(self._source, iterator)
        form = encoder.encode(place, "the place in the data")
        if encoder.lost:
            return []
        return [copy.deepcopy({"count": count, "forms": [form, self._parts.state()]})]
