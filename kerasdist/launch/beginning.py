"""Begins the workers of one start of a job, here and through ssh."""

from __future__ import annotations

import contextlib
import os
import queue
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from kerasdist.job.listening import COORDINATOR_FD
from kerasdist.job.secret import SECRET
from kerasdist.launch import commands, environment
from kerasdist.launch.output import Screen
from kerasdist.launch.placement import Seat, open_coordinator
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
    coordinator, listener = open_coordinator(seats)
    of_job = environment.of_job(spec, number)
    with listener or contextlib.nullcontext():
        for seat in seats:
            variables = environment.of_worker(spec, seat, len(seats), coordinator, number) | of_job
            opened = listener if seat.rank == 0 else None
            if opened is not None:
                variables[COORDINATOR_FD] = str(opened.fileno())
            # Another machine gets no variables of this process: ssh takes them as arguments, which
            # every user sees, and so the secret goes by standard input.
            secret = None if seat.host is None else _secret(spec, variables)
            if seat.host is None:
                command = commands.here(spec, seat, opened)
            else:
                command = commands.there(spec, seat, variables)
            start = Start(
                rank=seat.rank,
                name=f"worker {seat.rank}/{len(seats)}",
                command=command,
                variables=variables,
                directory=spec.directory,
                log=log_file(spec.logs, number, seat.rank),
                secret=secret,
                listener=opened,
            )
            worker = Worker(start, screen, events)
            if opened is not None:
                opened.close()  # the worker has it
            yield worker


def _secret(spec: JobSpec, variables: Mapping[str, str]) -> str:
    """Returns the secret in a worker's variables or in this process's; empty: it is in a file."""
    return {**os.environ, **spec.environment, **variables}.get(SECRET, "")


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
