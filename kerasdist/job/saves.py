"""Files that all workers save: the chief writes, the others wait until it has written.

A worker cannot know whether the chief saves too: a script may let one worker save alone. So the
hub, which knows how far the chief is, answers a worker that waits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, final

CHANNEL = "saves"
"""Of the hub's answers."""

_KEPT = 1000


@final
@dataclass(frozen=True)
class Save:
    """A worker that is about to save.

    Attributes:
        rank: The worker.
        number: Which of its questions this is.
        step: How many steps it had begun.
        path: Where to.
        occurrence: How often it has saved to that path in that step before.
        index: How often it has saved to any path in that step before.
        since: When it began to wait.
    """

    rank: int
    number: int
    step: int
    path: str
    occurrence: int
    index: int
    since: float


@final
class Saves:
    """What the chief has written, and who waits for what."""

    def __init__(self) -> None:
        self._written: dict[tuple[int, str, int], Mapping[str, Any]] = {}
        self._of_step: Counter[int] = Counter()
        self._of_path: Counter[tuple[int, str]] = Counter()
        self._waiting: list[Save] = []

    def wrote(self, step: int, path: str, outcome: Mapping[str, Any]) -> None:
        """Notes that the chief has written a file, or could not.

        Args:
            step: How many steps it had begun.
            path: Where to.
            outcome: What the others are to know of the file.
        """
        self._written[step, path, self._of_path[step, path]] = outcome
        self._of_step[step] += 1
        self._of_path[step, path] += 1
        if len(self._written) > _KEPT:
            del self._written[next(iter(self._written))]

    def wait(self, save: Save) -> None:
        """Notes a worker that waits.

        Args:
            save: What it is about to save.
        """
        self._waiting.append(save)

    def answers(
        self, chief_step: int, chief_waits_for: frozenset[int]
    ) -> Iterator[tuple[Save, Mapping[str, Any]]]:
        """Yields the answers that are known now, each once: an outcome; empty: write it yourself.

        Args:
            chief_step: How many steps the chief has begun.
            chief_waits_for: The workers that the chief waits for, so that it will not save before
                they go on.
        """
        waiting, self._waiting = self._waiting, []
        for save in waiting:
            outcome = self._written.get((save.step, save.path, save.occurrence))
            if outcome is not None:
                yield save, outcome
            elif (
                self._of_step[save.step] > save.index  # the chief has saved something else instead
                or chief_step > save.step
                or save.rank in chief_waits_for
            ):
                yield save, {}
            else:
                self._waiting.append(save)

    def overdue(self, before: float) -> Save | None:
        """Returns one that has waited for too long.

        Args:
            before: When it began, at the latest.
        """
        return next((save for save in self._waiting if save.since < before), None)


@final
class OwnSaves:
    """A worker's side: what it asks the hub about its saves."""

    def __init__(self) -> None:
        self._number = 0
        self._of_step: Counter[int] = Counter()
        self._of_path: Counter[tuple[int, str]] = Counter()

    def question(self, step: int, path: str) -> dict[str, Any]:
        """Returns the next question: whether the chief has written this file.

        Args:
            step: How many steps this worker has begun.
            path: Where it is about to save to.
        """
        self._number += 1
        asked = {
            "number": self._number,
            "step": step,
            "path": path,
            "occurrence": self._of_path[step, path],
            "index": self._of_step[step],
        }
        self._of_step[step] += 1
        self._of_path[step, path] += 1
        return asked
