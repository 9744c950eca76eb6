"""Strikes workers of a job at random moments, and takes the time until the job starts again."""

from __future__ import annotations

import functools
import os
import random
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from soaking.marks import END, PHASES, Mark, read

STOPS_EVERY = 4
"""Of so many strikes one is a SIGSTOP, which nobody notices but for the missing signs of life."""

HANG_SECONDS = 180.0
"""A job that has not started again so long after a strike, or has not come to where the next
strike is to be, hangs."""

_LOOK_SECONDS = 0.002


@dataclass(frozen=True)
class Strike:
    """What was done, in which phase of the job, and how long it took until the job started again.

    A job is in a phase if any worker is: one that is killed while the chief writes a backup is as
    good as the chief.
    """

    phase: str
    number: signal.Signals
    victim: Mark
    seconds: float


class Striker(ABC):
    """A thread that does something to a job.

    Args:
        marks: Where the workers tell what they do.
        seed: Of all that is random here.
        give_up: Ends the job when it hangs.
    """

    def __init__(self, marks: Path, seed: int, give_up: Callable[[], None]) -> None:
        self._marks = marks
        self._random = random.Random(seed)
        self._give_up = give_up
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.hung: list[str] = []

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._act()
        except OSError as error:  # a time-out above all
            self.hung.append(str(error))
            self._give_up()

    @abstractmethod
    def _act(self) -> None:
        """Does all that is to be done, until there is enough of it or the job is over."""

    def _newest(self, attempt: int) -> list[Mark]:
        """The marks of the newest start of the job, none if that is before `attempt`."""
        found: list[Mark] = []
        while marks := read(self._marks, attempt):
            found, attempt = marks, attempt + 1
        return found

    def _wait(self, condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + HANG_SECONDS
        while not self._over.is_set() and not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited {HANG_SECONDS:g} s for {what}")
            time.sleep(_LOOK_SECONDS)


class Killer(Striker):
    """Strikes each start of a job once, in all phases alike, until it has enough.

    Args:
        marks: Where the workers tell what they do.
        kills: How often to strike.
        lengths: How long each phase lasts: a strike comes at a random part of it.
        seed: Of all that is random here.
        give_up: Ends the job when it hangs.
    """

    def __init__(
        self,
        marks: Path,
        kills: int,
        lengths: Mapping[str, float],
        seed: int,
        give_up: Callable[[], None],
    ) -> None:
        super().__init__(marks, seed, give_up)
        self._kills = kills
        self._lengths = dict(lengths)
        self.strikes: list[Strike] = []

    def _act(self) -> None:
        attempt = 0
        while len(self.strikes) < self._kills and not self._over.is_set():
            phase = self._next_phase()
            self._wait(functools.partial(self._is_in, phase, attempt), f"phase {phase!r}")
            self._over.wait(self._random.random() * self._lengths[phase])
            marks = self._newest(attempt)
            if not marks or any(mark.phase == END for mark in marks):
                continue
            victim = self._random.choice(marks)
            stops = len(self.strikes) % STOPS_EVERY == STOPS_EVERY - 1
            number = signal.SIGSTOP if stops else signal.SIGKILL
            try:
                os.kill(victim.pid, number)
            except ProcessLookupError:  # the job has failed by itself
                continue
            began = time.monotonic()
            hit = phase if any(mark.phase == phase for mark in marks) else victim.phase
            if hit != phase:  # too late: the machine is less busy than it was
                self._lengths[phase] /= 2
            attempt = victim.attempt + 1
            what = f"a start after {number.name} to {victim}"
            self._wait(functools.partial(self._newest, attempt), what)
            self.strikes.append(Strike(hit, number, victim, time.monotonic() - began))

    def _next_phase(self) -> str:
        """One of those that were struck least; a strike that comes late hits another one."""
        struck = Counter(strike.phase for strike in self.strikes)
        least = min(struck[phase] for phase in PHASES)
        return self._random.choice([phase for phase in PHASES if struck[phase] == least])

    def _is_in(self, phase: str, attempt: int) -> bool:
        return any(mark.phase == phase for mark in self._newest(attempt))
