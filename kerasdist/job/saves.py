"""Files that all workers save: the chief writes, the others wait until it has written.

A worker cannot know whether the chief saves too: a script may let one worker save alone. So the
coordinator, which knows the chief's step, answers the workers that wait.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, final

CHANNEL = "saves"
"""Of the coordinator's answers."""

_KEPT = 1000


@final
@dataclass(frozen=True)
class Save:
    """A worker that is about to save.

    Attributes:
        rank: The worker.
        number: The number of its question.
        step: How many steps it had begun.
        path: The path of the file.
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
    """The files that the chief has written, and the workers that wait for one."""

    def __init__(self) -> None:
        self._written: dict[tuple[int, str, int], Mapping[str, Any]] = {}
        self._of_step: Counter[int] = Counter()
        self._of_path: Counter[tuple[int, str]] = Counter()
        self._waiting: list[Save] = []

    def wrote(self, step: int, path: str, outcome: Mapping[str, Any]) -> None:
        """Adds a file that the chief has written, or could not write."""
        self._written[step, path, self._of_path[step, path]] = outcome
        self._of_step[step] += 1
        self._of_path[step, path] += 1
        if len(self._written) > _KEPT:
            del self._written[next(iter(self._written))]

    def take_waiting(self) -> list[Save]:
        """Returns the workers that wait, to be asked about again."""
        waiting, self._waiting = self._waiting, []
        return waiting

    def answers(
        self, asking: Iterable[Save], chief_step: int, chief_waits_for: Callable[[int], bool]
    ) -> Iterator[tuple[Save, Mapping[str, Any]]]:
        """Yields the answers that are known; after an empty one the worker writes the file.

        The other workers wait.
        """
        for save in asking:
            outcome = self._written.get((save.step, save.path, save.occurrence))
            if outcome is not None:
                yield save, outcome
            elif (
                self._of_step[save.step] > save.index  # the chief has saved something else instead
                or chief_step > save.step
                or chief_waits_for(save.rank)
            ):
                yield save, {}
            else:
                self._waiting.append(save)

    def overdue(self, before: float) -> Save | None:
        """Returns a worker that has waited for too long."""
        return next((save for save in self._waiting if save.since < before), None)


@final
class OwnSaves:
    """A worker's questions to the coordinator about its saves."""

    def __init__(self) -> None:
        self._number = 0
        self._of_step: Counter[int] = Counter()
        self._of_path: Counter[tuple[int, str]] = Counter()

    def question(self, step: int, path: str) -> dict[str, Any]:
        """Returns the next question: whether the chief has written this file."""
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
