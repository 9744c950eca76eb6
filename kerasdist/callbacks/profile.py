"""Profiles some steps of `fit`, for ``kerasdist run --profile``."""

from __future__ import annotations

import gzip
import itertools
import json
import platform
import re
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import final

import keras

from kerasdist import keras_compat
from kerasdist.backends import registry
from kerasdist.backends.base import metering
from kerasdist.backends.base.interface import Event, ReplicaSet
from kerasdist.core import whole_files
from kerasdist.core.user_warnings import warn_user
from kerasdist.errors import JobError
from kerasdist.job.job import Job
from kerasdist.job.launcher import ProfiledSteps

_CLOCK = "kerasdist clock"
_MARK = re.compile(rf"{_CLOCK} (\d+)")

_ROUNDS = 11
"""How many times the workers exchange messages and read their clocks, to compare the clocks."""

STEPS = "steps of fit"
"""The name of the trace's row that shows when each step ended on the host."""


@final
class Profile(keras.callbacks.Callback):
    """Runs the framework's profiler, and writes its events with the times of the chief's clock."""

    def __init__(self, steps: ProfiledSteps, meter: metering.Meter, replicas: ReplicaSet) -> None:
        super().__init__()
        self._wanted = steps
        self._meter = meter
        self._replicas = replicas
        self._profiler = registry.current().profiler()
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._ends: list[tuple[int, int]] = []  # each step's number and end (ns)
        self._is_done = False
        meter.watch(self._watch)

    def on_train_begin(self, logs: dict[str, object] | None = None) -> None:
        """Compares the clocks of the workers. All workers must call this method."""
        self._offset = offset_of_clock(self._replicas.job)

    def on_train_end(self, logs: dict[str, object] | None = None) -> None:
        """Ends the profile if `fit` has ended before the last step to profile."""
        if self._folder is not None:
            self._stop()
        elif not self._is_done:
            warn_user(
                f"There is no profile: expected more than {self._wanted.first} steps of fit. "
                f"Received: {self._meter.steps}. Choose earlier steps: kerasdist run --profile "
                "1:3 ..."
            )

    def _watch(self, steps: int) -> None:
        if self._is_done:
            return
        if self._folder is not None:
            self._ends.append((steps, time.time_ns()))
            if steps >= self._wanted.last:
                self._stop()
        elif steps >= self._wanted.first:
            self._start(steps)

    def _start(self, steps: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="kerasdist-profile-")
        self._profiler.start(Path(self._folder.name))
        now = time.time_ns()
        with self._profiler.marked(f"{_CLOCK} {now}"):
            self._ends = [(steps, now)]

    def _stop(self) -> None:
        assert self._folder is not None
        self._is_done = True
        keras_compat.numbers_of(self._meter.logs)  # waits for the device
        with self._folder as name:
            events = aligned(self._profiler.stop(Path(name)), self._offset.microseconds)
        self._folder = None
        events += _steps(self._ends, self._offset.microseconds)
        rank = self._replicas.rank
        trace = {
            "traceEvents": events,
            "kerasdist": {
                "worker": rank,
                "host": platform.node(),
                "steps": [self._ends[0][0], self._ends[-1][0]],
                "clock_offset_us": self._offset.microseconds,
                "clock_spread_us": self._offset.spread,
            },
        }
        self._wanted.folder.mkdir(parents=True, exist_ok=True)
        with whole_files.replacing(self._wanted.of_worker(rank)) as unfinished:
            Path(unfinished).write_bytes(gzip.compress(json.dumps(trace).encode(), 5))


def aligned(events: Iterable[Event], offset: float) -> list[Event]:
    """Returns the events, with times converted to the chief's clock: microseconds since 1970.

    One of the events is the mark that `Profile` has set. The name of the mark contains the time at
    which it was set, by this worker's clock.
    """
    events = list(events)
    marks = [(match, one) for one in events if (match := _MARK.match(str(one.get("name"))))]
    if not marks:
        raise JobError(
            f"Expected the mark of the clock in the profile. Received: {len(events)} events "
            "without it. Profile fewer steps: the profiler keeps a limited number of events."
        )
    mark, event = marks[0]
    shift = int(mark[1]) / 1e3 - float(event["ts"]) - offset
    return [
        one if "ts" not in one else {**one, "ts": float(one["ts"]) + shift}
        for one in events
        if not _MARK.match(str(one.get("name")))
    ]


def _steps(ends: list[tuple[int, int]], offset: float) -> list[Event]:
    """Returns the events of the row `STEPS`: one for each step, or for each call of several."""
    row = {"pid": STEPS, "tid": 0}
    events: list[Event] = []
    for (_, begin), (number, end) in itertools.pairwise(ends):
        times = {"ts": begin / 1e3 - offset, "dur": (end - begin) / 1e3}
        events.append({"ph": "X", "name": f"step {number}", **row, **times})
    return events


@final
@dataclass(frozen=True)
class Offset:
    """The difference between a worker's clock and the chief's.

    Attributes:
        microseconds: The worker's time minus the chief's.
        spread: The range of the middle half of the measurements, in microseconds.
    """

    microseconds: float
    spread: float


def offset_of_clock(job: Job | None) -> Offset:
    """Measures how far this worker's clock is ahead of the chief's.

    All workers must call this function. If they are on one machine, they share a clock. Otherwise
    they make several exchanges. At the end of each exchange, the coordinator sends a message to all
    workers at once, and each worker reads its clock when the message comes. The offset is the
    median of how far this worker's clock was ahead of the chief's in each exchange. In each
    exchange the error is smaller than the network's latency, because it is the difference between
    the message's travel times to this worker and to the chief.
    """
    if job is None or not any(job.compare_objects("machines", platform.node())):
        return Offset(0.0, 0.0)
    stamps: list[int] = []
    for number in range(_ROUNDS):
        job.all_gather_object(f"clock {number}", None)
        stamps.append(time.time_ns())
    chiefs = job.broadcast_object("clocks", stamps)
    return offset_of_stamps(stamps, chiefs)


def offset_of_stamps(own: list[int], chiefs: list[int]) -> Offset:
    """Returns how far this worker's clock is ahead of the chief's.

    The arguments are the times (ns) at which this worker and the chief ended each exchange.
    """
    differences = sorted((mine - theirs) / 1e3 for mine, theirs in zip(own, chiefs, strict=True))
    quarter = len(differences) // 4
    spread = differences[-1 - quarter] - differences[quarter]
    return Offset(median(differences), spread)
