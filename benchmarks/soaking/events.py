"""What happens to a job of a changing size, at random moments: workers and hosts go and come.

The hosts are addresses of this machine, to which an ``ssh`` of the soak's leads, or no longer
(`tests.multiprocess.hosts`). One more machine joins by itself, and has a network of its own
(`soaking.network`).
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from soaking.killer import Striker
from soaking.marks import BREAK, ENOUGH, Mark
from soaking.network import HOSTS, MACHINE, Machine
from tests.multiprocess import hosts

KINDS = ("kill", "stop", "fail", "lose", "return", "cut", "join")
"""SIGKILL and SIGSTOP of a worker; its connections to the others break, so that a collective fails
in it; a host or the machine goes, with all that runs there; hosts that are up again; the machine's
cable is cut, or mended, and the machine joins."""


BORNE_SECONDS = 40.0
"""A job that has not started again so long after a worker's connections broke has new ones: gRPC,
by which TensorFlow's collectives go, connects again."""


@dataclass(frozen=True)
class Event:
    """What has happened, in a job of how many workers, and how many it then has.

    `start` and `step` are the seconds until the job had started again, and until it had made a
    step. `start` is None if it went on without, `step` also if the next event came before.
    """

    kind: str
    victim: str
    before: int
    after: int
    start: float | None
    step: float | None


class Events(Striker):
    """Makes events happen until there are enough, then tells the workers that they may end.

    Args:
        folder: The job's.
        machine: The one that joins.
        count: How many events are enough.
        seconds: After which time fewer are.
        mean: The mean time between a start of the job and the next event, in seconds.
        seed: Of all that is random here.
        give_up: Ends the job when it hangs.
    """

    def __init__(
        self,
        folder: Path,
        machine: Machine,
        count: int,
        seconds: float,
        mean: float,
        seed: int,
        give_up: Callable[[], None],
    ) -> None:
        super().__init__(folder / "marks", seed, give_up)
        self._folder, self._machine, self._count, self._mean = folder, machine, count, mean
        self._until = time.monotonic() + seconds
        self.events: list[Event] = []

    def _act(self) -> None:
        marks = self._started(0)
        self._pass(self._random.expovariate(1 / self._mean), 0, 0.0)
        while self._is_short() and not self._over.is_set():
            marks = self._newest(marks[0].attempt)  # a slot that was left out may have come back
            before, attempt, began = len(marks), marks[0].attempt, time.monotonic()
            try:
                kind, victim = self._strike(marks)
            except (FileNotFoundError, ProcessLookupError):  # the job has failed by itself
                continue
            start = None
            if kind != "fail" or not self._is_borne(attempt):
                marks = self._started(attempt + 1)
                start = time.monotonic() - began
            step = self._pass(self._random.expovariate(1 / self._mean), attempt + 1, began)
            self.events.append(Event(kind, victim, before, len(marks), start, step))
            print(f"{len(self.events)}: {self.events[-1]}", flush=True)
        (self._folder / ENOUGH).touch()

    def _is_short(self) -> bool:
        return len(self.events) < self._count and time.monotonic() < self._until

    def _is_borne(self, attempt: int) -> bool:
        """Waits; returns whether this start of the job goes on."""
        until = time.monotonic() + BORNE_SECONDS
        while time.monotonic() < until and not self._over.wait(0.1):
            if self._newest(attempt + 1):
                return False
        return True

    def _started(self, attempt: int) -> list[Mark]:
        """Waits for a start of the job, and returns the marks of its workers."""
        self._wait(functools.partial(self._newest, attempt), f"start {attempt}")
        time.sleep(1.0)  # the others, which start within some milliseconds
        return self._newest(attempt)

    def _pass(self, seconds: float, attempt: int, began: float) -> float | None:
        """Lets time pass; returns how long after `began` this start of the job made a step."""
        until, step = time.monotonic() + seconds, None
        while time.monotonic() < until and not self._over.wait(0.02):
            trains = any(mark.phase not in ("start", "compile") for mark in self._newest(attempt))
            if step is None and trains:
                step = time.monotonic() - began
        return step

    def _strike(self, marks: Sequence[Mark]) -> tuple[str, str]:
        """Makes something happen; returns what, and to whom."""
        down = [name for name in HOSTS if (self._folder / f"down-{name}").exists()]
        places = {mark: _variable(mark.pid, "ON") for mark in marks}
        trains = all(mark.phase not in ("start", "compile") for mark in marks)
        is_possible = {
            "kill": True,
            "stop": True,
            "fail": trains and len(marks) > 1,  # else no connection is there to break
            "lose": len(marks) > 1,
            "return": bool(down),
            "cut": len(marks) > 1 and MACHINE in places.values(),
            "join": not self._machine.has_joined,
        }
        possible = [kind for kind in KINDS if is_possible[kind]]
        kind = self._random.choice(possible)
        victim = self._random.choice(marks)
        host = places[victim]
        if kind == "return":
            hosts.bring_back(self._folder)
            return kind, " ".join(down)
        if kind in ("join", "cut"):
            self._machine.join() if kind == "join" else self._machine.cut()
            return kind, MACHINE
        if kind == "fail":
            (self._folder / BREAK).write_text(str(victim.pid), encoding="utf-8")
        elif kind == "lose":
            if host != MACHINE:
                hosts.take_down(self._folder, host)
            for pid in _processes_on(host):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        else:
            os.kill(victim.pid, signal.SIGSTOP if kind == "stop" else signal.SIGKILL)
        return kind, f"worker {victim.rank} on {host}, in {victim.phase}"


def _variable(pid: int, name: str) -> str:
    pairs = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(pair.partition("=")[::2] for pair in pairs)[name]


def _processes_on(host: str) -> Iterator[int]:
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, KeyError):  # it has ended, or is no host's
            if _variable(int(folder.name), "ON") == host:
                yield int(folder.name)
