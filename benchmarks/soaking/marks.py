"""What a worker is doing right now, told to the killer by a small file a start and worker.

It imports no framework: a worker's first mark is its first deed.
"""

from __future__ import annotations

import os
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kerasdist.cluster import kerasdist_variables

PHASES = ("start", "compile", "epoch", "validation", "backup")

END = "end"
"""After training; nobody is killed there."""


ENOUGH, BREAK = "enough", "break"
"""Files that tell workers to end training, and one of them to break its connections."""


@dataclass(frozen=True)
class Mark:
    """A worker of a job's start number `attempt`, and what it is doing."""

    attempt: int
    rank: int
    pid: int
    phase: str


class Teller:
    """Writes this worker's marks, and keeps how long each phase has lasted."""

    def __init__(self, folder: Path) -> None:
        self._path = (
            folder
            / f"{os.environ[kerasdist_variables.RESTART]}-{os.environ[kerasdist_variables.RANK]}"
        )
        self._phase, self._since = "start", time.monotonic()
        self._seconds: dict[str, list[float]] = defaultdict(list)
        self.tell("start")

    def tell(self, phase: str) -> None:
        now = time.monotonic()
        if phase != self._phase:
            self._seconds[self._phase].append(now - self._since)
            self._phase, self._since = phase, now
        unfinished = self._path.with_suffix(".unfinished")
        unfinished.write_text(f"{os.getpid()} {phase}", encoding="utf-8")
        unfinished.replace(self._path)

    def lengths(self) -> dict[str, float]:
        """Returns how long each phase lasts, as a rule."""
        return {phase: statistics.median(each) for phase, each in self._seconds.items()}

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        before = self._phase
        self.tell(phase)
        yield
        self.tell(before)


def read(folder: Path, attempt: int) -> list[Mark]:
    """Returns the marks of one start of the job, by rank."""
    marks = []
    for path in sorted(folder.glob(f"{attempt}-*")):
        if path.suffix != ".unfinished":
            pid, phase = path.read_text(encoding="utf-8").split()
            marks.append(Mark(attempt, int(path.name.partition("-")[2]), int(pid), phase))
    return marks
