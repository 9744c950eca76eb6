"""What global batches a worker has trained on: their forms, step by step."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from typing import Any, final


def first_difference(everyone: Sequence[Sequence[Sequence[Any]]]) -> tuple[int, list[Any]]:
    """Returns the first step at which workers had other forms, from 1, and what each had there.

    Args:
        everyone: The `Course.runs` of each worker, by rank; they are not all equal.
    """
    forms = [
        itertools.chain.from_iterable(itertools.repeat(form, count) for count, form in runs)
        for runs in everyone
    ]
    for step, now in enumerate(itertools.zip_longest(*forms), 1):
        if len(set(now)) > 1:
            return step, list(now)
    raise AssertionError("the runs are equal")


@final
class Course:
    """The forms of the batches since the workers have compared them last.

    A step costs a comparison with the form of the step before. Another thread may ask for a report
    at any time.
    """

    def __init__(self) -> None:
        """Starts without a step."""
        self._stretch = _Stretch(0)

    def note(self, form: Hashable) -> None:
        """Notes a step.

        Args:
            form: The shapes of the global batch, or its number of rows.
        """
        stretch = self._stretch
        if form != stretch.form or not stretch.steps:
            stretch.form = form
            stretch.changes.append((stretch.steps, str(form)))
        stretch.steps += 1  # last, so that a report never lacks the form of a step it counts

    def runs(self) -> list[list[Any]]:
        """Returns the forms, each with the number of steps in a row that had it."""
        stretch = self._stretch
        begins = [at for at, _ in stretch.changes]
        ends = [*begins[1:], stretch.steps]
        return [
            [end - begin, form]
            for begin, end, (_, form) in zip(begins, ends, stretch.changes, strict=False)
        ]

    def report(self) -> dict[str, Any]:
        """Returns the same as JSON, with the number of stretches that are over."""
        stretch = self._stretch
        steps, changes = stretch.steps, stretch.changes[:]
        return {"stretch": stretch.number, "steps": steps, "changes": changes}

    def clear(self) -> None:
        """Forgets all forms seen so far."""
        self._stretch = _Stretch(self._stretch.number + 1)


@final
class _Stretch:
    """The steps between two comparisons."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.steps = 0
        self.form: Hashable = None
        # The number of each step that had another form than the one before, from 0, and the form.
        self.changes: list[tuple[int, str]] = []
