"""Contenders that live in processes of their own and take turns, so that noise hits all alike.

A ratio is the median over the rounds of contender ÷ reference in the same round, so that drift of
the machine's speed cancels. "~" marks one whose rounds are apart by more than 15 %. A contender
that dies is started again and its deaths are counted; one that cannot keep alive has no ratio.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

MAX_DEATHS = 5
NOISY = 0.15

_NOTHING: Mapping[str, str] = {}


class Contender:
    """A child process that does its work once on request and answers with its seconds."""

    def __init__(
        self, script: str, backend: str, *arguments: str, environment: Mapping[str, str] = _NOTHING
    ) -> None:
        self._command = [sys.executable, script, "--child", backend, *arguments]
        self._environment = {
            **os.environ,
            "KERAS_BACKEND": backend,
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "CUDA_VISIBLE_DEVICES": "",
            **environment,
        }
        self.deaths = 0
        self.peak = 0
        self._start()

    def _start(self) -> None:
        self._process = subprocess.Popen(
            self._command,
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if self.deaths else None,
            text=True,
        )

    def seconds(self) -> float:
        """Has the work done once; NaN if the contender cannot keep alive."""
        while self.deaths < MAX_DEATHS:
            self.begin()
            if (seconds := self.finish()) is not None:
                return seconds
            self._process.wait()
            self.deaths += 1
            self._start()
        return float("nan")

    def begin(self) -> None:
        """Asks for the work."""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write("go\n")
            self._process.stdin.flush()

    def finish(self) -> float | None:
        """Waits for the work's seconds; None if the process has died."""
        answer = self._process.stdout.readline()
        return float(answer) if answer else None

    def end(self) -> None:
        """Ends the process; `peak` has the most memory that it has had, in MB."""
        status = Path(f"/proc/{self._process.pid}/status")
        said = status.read_text("utf-8") if status.exists() else ""
        if "VmHWM:" in said:
            self.peak = int(said.split("VmHWM:")[1].split()[0]) // 1000
        self._process.kill()
        self._process.wait()


class Team:
    """Processes that do their work together, as the workers of a job do; the slowest counts."""

    def __init__(self, members: Sequence[Contender]) -> None:
        self._members = members
        self.deaths = 0

    @property
    def peak(self) -> int:
        """The most memory that one of the processes has had, in MB, once they have ended."""
        return max(member.peak for member in self._members)

    def seconds(self) -> float:
        """Has the work done once; NaN if a process has died: the others cannot go on without it."""
        if self.deaths:
            return float("nan")
        for member in self._members:
            member.begin()
        seconds = [member.finish() for member in self._members]
        alive = [each for each in seconds if each is not None]
        self.deaths = len(seconds) - len(alive)
        return float("nan") if self.deaths else max(alive)

    def end(self) -> None:
        for member in self._members:
            member.end()


def serve(make: Callable[[], Callable[[], object]]) -> None:
    """In the child: does the work for every line on standard input, after two rounds of warm-up."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever frameworks print goes to standard error
    work = make()
    work()
    work()
    for _ in sys.stdin:
        begin = time.perf_counter()
        work()
        answers.write(f"{time.perf_counter() - begin}\n")
        answers.flush()


def measure(contenders: Mapping[str, Contender | Team], rounds: int) -> dict[str, list[float]]:
    """Returns the seconds of each contender, one figure a round, and ends them.

    A first round is not counted: some contenders still warm up beside those that have begun.

    Args:
        contenders: The contenders, by name.
        rounds: How often each has its turn.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    try:
        for number in range(1 + rounds):
            for name, contender in contenders.items():
                taken = contender.seconds()
                if number:
                    seconds[name].append(taken)
        for name, contender in contenders.items():
            if contender.deaths:
                print(f"{name!r} died {contender.deaths} times")
    finally:
        for contender in contenders.values():
            contender.end()
    return seconds


def median(values: Sequence[float]) -> float:
    alive = [value for value in values if value == value]
    return statistics.median(alive) if alive else float("nan")


def ratio(values: Sequence[float], reference: Sequence[float]) -> float:
    return median(_ratios(values, reference))


def shown_ratio(values: Sequence[float] | None, reference: Sequence[float] | None) -> str:
    """Returns a ratio, with "~" if the rounds disagree; "—" if a contender is missing or dead."""
    found = _ratios(values or (), reference or ())
    if not found:
        return "—"
    middle = median(found)
    is_noisy = max(found) - min(found) > NOISY * middle
    return f"{middle:.2f}{'~' if is_noisy else ''}"


def _ratios(values: Sequence[float], reference: Sequence[float]) -> list[float]:
    pairs = zip(values, reference, strict=bool(values) and bool(reference))
    return [a / b for a, b in pairs if a == a and b == b]
