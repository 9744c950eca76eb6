"""The shapes of the global batches that a worker has trained on, step by step."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, final


def first_difference(everyone: Sequence[Sequence[Sequence[Any]]]) -> tuple[int, list[Any]]:
    """Returns the first step, from 1, at which batches differed, and the form on each worker."""
    forms = [
        itertools.chain.from_iterable(itertools.repeat(form, count) for count, form in runs)
        for runs in everyone
    ]
    for step, now in enumerate(itertools.zip_longest(*forms), 1):
        if len(set(now)) > 1:
            return step, list(now)
    raise AssertionError("the runs are equal")


@final
class BatchHistory:
    """The forms of the batches since workers last compared them.

    `add` only compares with the form of the step before. Another thread may call `report` at any
    time.

    Attributes:
        count_begun: Returns how many batches steps have ever read, if a step is added as it ends;
            None: a step is added as it begins.
    """

    count_begun: Callable[[], int] | None = None

    def __init__(self) -> None:
        self._stretch = _Stretch(0, 0)

    def add(self, form: Hashable) -> None:
        """Adds the form of one step."""
        stretch = self._stretch
        if form != stretch.form or not stretch.steps:
            stretch.form = form
            stretch.changes.append((stretch.steps, str(form)))
        stretch.steps += 1  # last, so that a report never lacks the form of a step it counts

    def runs(self) -> list[list[Any]]:
        """Returns the forms, each with the number of consecutive steps that had it."""
        stretch = self._stretch
        begins = [at for at, _ in stretch.changes]
        ends = [*begins[1:], stretch.steps]
        return [
            [end - begin, form]
            for begin, end, (_, form) in zip(begins, ends, stretch.changes, strict=False)
        ]

    def end(self) -> list[list[Any]]:
        """Returns the forms, as `runs`, and reports that no further step comes before `clear`."""
        self._stretch.ended = True
        return self.runs()

    def report(self) -> dict[str, Any]:
        """Returns the forms as JSON, with the number of calls of `clear` before."""
        stretch = self._stretch
        steps, changes = stretch.steps, stretch.changes[:]
        ended = stretch.ended
        found = {"stretch": stretch.number, "steps": steps, "changes": changes, "ended": ended}
        if self.count_begun is not None:
            found["begun"] = self.count_begun() - stretch.begun_before
        return found

    def clear(self) -> None:
        """Forgets all forms seen so far."""
        begun = 0 if self.count_begun is None else self.count_begun()
        self._stretch = _Stretch(self._stretch.number + 1, begun)


@final
class _Stretch:
    """The steps between two comparisons."""

    def __init__(self, number: int, begun_before: int) -> None:
        self.number = number
        self.begun_before = begun_before
        self.steps = 0
        self.ended = False
        self.form: Hashable = None
        # For each step with another form than the step before: its number, from 0, and its form.
        self.changes: list[tuple[int, str]] = []
