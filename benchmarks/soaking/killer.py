"""Strikes workers of a job at random moments, and takes the time until the job starts again."""

from __future__ import annotations

import itertools
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from soaking.marks import END, PHASES, Mark, read

STOPS_EVERY = 4
"""Of so many strikes one is a SIGSTOP, which nobody notices but for the missing signs of life."""

HANG_SECONDS = 180.0
"""A job that has not started again so long after a strike, or has not come to where the next
strike is to be, hangs."""

_LOOK_SECONDS = 0.002


@dataclass(frozen=True)
class Strike:
    """What is planned: a signal to a worker, once one is in a phase and a part of it is over."""

    phase: str
    part: float
    number: signal.Signals
    victim: int


@dataclass(frozen=True)
class Struck:
    """What has been done, and how long it took until the job started again."""

    victim: Mark
    number: signal.Signals
    seconds: float


def plan(strikes: int, workers: int, seed: int) -> list[Strike]:
    """Returns strikes in all phases alike, in random order."""
    generator = random.Random(seed)
    phases = list(itertools.islice(itertools.cycle(PHASES), strikes))
    stopping = [index % STOPS_EVERY == STOPS_EVERY - 1 for index in range(strikes)]
    generator.shuffle(phases)
    generator.shuffle(stopping)
    return [
        Strike(
            phase,
            generator.random(),
            signal.SIGSTOP if stops else signal.SIGKILL,
            generator.randrange(workers),
        )
        for phase, stops in zip(phases, stopping, strict=True)
    ]


class Killer:
    """A thread that carries out a plan, one strike a start of the job.

    Args:
        marks: Where the workers tell what they do.
        strikes: The plan.
        longest: How long each phase lasts.
        give_up: Ends the job when it hangs.
    """

    def __init__(
        self,
        marks: Path,
        strikes: Sequence[Strike],
        longest: Mapping[str, float],
        give_up: Callable[[], None],
    ) -> None:
        self._marks = marks
        self._strikes = strikes
        self._longest = longest
        self._give_up = give_up
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.struck: list[Struck] = []
        self.hung: list[str] = []

    def __enter__(self) -> Killer:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        attempt = 0
        try:
            for strike in self._strikes:
                victim = self._strike(strike, attempt)
                began = time.monotonic()
                if victim is None:
                    return
                attempt = victim.attempt + 1
                self._await_start(victim.attempt + 1, strike)
                self.struck.append(Struck(victim, strike.number, time.monotonic() - began))
        except TimeoutError as error:
            self.hung.append(str(error))
            self._give_up()

    def _strike(self, strike: Strike, attempt: int) -> Mark | None:
        """Strikes, in this start or a later one; None if the job has ended before."""
        while not self._over.is_set():
            self._wait(lambda: self._in(strike.phase, attempt), f"{strike}")
            self._over.wait(strike.part * self._longest[strike.phase])
            marks = self._newest(attempt)
            marks = [each for each in marks if each.rank == strike.victim] or marks
            if not marks or marks[0].phase == END:
                continue
            try:
                os.kill(marks[0].pid, strike.number)
            except ProcessLookupError:
                continue
            return marks[0]
        return None

    def _newest(self, attempt: int) -> list[Mark]:
        """The marks of the newest start of the job, none if that is before `attempt`."""
        found: list[Mark] = []
        while marks := read(self._marks, attempt):
            found, attempt = marks, attempt + 1
        return found

    def _in(self, phase: str, attempt: int) -> bool:
        return any(mark.phase == phase for mark in self._newest(attempt))

    def _wait(self, condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + HANG_SECONDS
        while not self._over.is_set() and not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited {HANG_SECONDS:g} s for {what}")
            time.sleep(_LOOK_SECONDS)
