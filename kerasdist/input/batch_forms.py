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

    A step costs a comparison with the form of the step before.
    """

    def __init__(self) -> None:
        """Starts without a step."""
        self._form: Hashable = None
        self._same = 0
        self._before: list[tuple[int, str]] = []

    def note(self, form: Hashable) -> None:
        """Notes a step.

        Args:
            form: The shapes of the global batch, or its number of rows.
        """
        if form == self._form:
            self._same += 1
            return
        self._close()
        self._form, self._same = form, 1

    def runs(self) -> list[list[Any]]:
        """Returns the forms, each with the number of steps in a row that had it."""
        self._close()
        return [[count, form] for count, form in self._before]

    def clear(self) -> None:
        """Forgets all forms seen so far."""
        self._form, self._same = None, 0
        self._before.clear()

    def _close(self) -> None:
        if self._same:
            self._before.append((self._same, str(self._form)))
        self._form, self._same = None, 0
