"""Begins the workers of one start of a job, here and through ssh."""

from __future__ import annotations

import queue
from collections.abc import Iterator, Sequence
from pathlib import Path

from kerasdist.launch import commands, environment
from kerasdist.launch.output import Screen
from kerasdist.launch.placement import Seat, meeting_point
from kerasdist.launch.spec import JobSpec
from kerasdist.launch.worker import Event, Start, Worker


def begin(
    spec: JobSpec,
    seats: Sequence[Seat],
    number: int,
    screen: Screen,
    events: queue.SimpleQueue[Event],
) -> Iterator[Worker]:
    """Begins the workers one after another, and yields each.

    Args:
        spec: The job.
        seats: Where its workers run.
        number: How often it has been started before.
        screen: This process's output.
        events: Told when a worker ends.

    Raises:
        OSError: If a worker cannot be started.
    """
    coordinator = meeting_point(seats)
    for seat in seats:
        variables = environment.of_worker(spec, seat, len(seats), coordinator, number)
        if seat.host is None:
            command = commands.here(spec, seat)
        else:
            command = commands.there(spec, seat, variables)
        start = Start(
            rank=seat.rank,
            name=f"worker {seat.rank}/{len(seats)}",
            command=command,
            variables=variables,
            directory=spec.directory,
            log=log_file(spec.logs, number, seat.rank),
        )
        yield Worker(start, screen, events)


def log_file(folder: Path | None, attempt: int, rank: int) -> Path | None:
    """Returns a worker's log file, with its folder made.

    Args:
        folder: The folder; None: there are no logs.
        attempt: How often the job has been started before.
        rank: The worker's number.
    """
    if folder is None:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"attempt-{attempt}-worker-{rank}.log"
