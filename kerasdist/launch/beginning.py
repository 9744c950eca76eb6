"""Starts the workers of one attempt, on this machine and through ssh."""

from __future__ import annotations

import contextlib
import os
import queue
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from kerasdist.job.listening import COORDINATOR_FD
from kerasdist.job.secret import SECRET
from kerasdist.job.status import FILE_DESCRIPTOR
from kerasdist.launch import commands, environment
from kerasdist.launch.board import Board
from kerasdist.launch.output import Screen
from kerasdist.launch.placement import Slot, open_coordinator
from kerasdist.launch.spec import JobSpec
from kerasdist.launch.worker import Event, Start, Worker


def begin(
    spec: JobSpec,
    slots: Sequence[Slot],
    number: int,
    screen: Screen,
    events: queue.SimpleQueue[Event],
    *,
    board: Board | None = None,
) -> Iterator[Worker]:
    """Starts the workers one after another, and yields each; the board gets their reports."""
    coordinator, listener = open_coordinator(slots)
    of_job = environment.of_job(spec, number)
    here = sum(slot.host is None for slot in slots)
    of_gpus = environment.of_gpus({**os.environ, **spec.environment}, here)
    with listener or contextlib.nullcontext():
        for slot in slots:
            variables = environment.of_worker(spec, slot, len(slots), coordinator, number) | of_job
            if slot.host is None:
                variables |= of_gpus[slot.local_rank]
            opened = listener if slot.rank == 0 else None
            inherited: list[int] = []
            if opened is not None:
                variables[COORDINATOR_FD] = str(opened.fileno())
                inherited.append(opened.fileno())
            reports = None
            if board is not None and slot.host is None:
                reports, to_worker = os.pipe()
                variables[FILE_DESCRIPTOR] = str(to_worker)
                inherited.append(to_worker)
            carried = None
            if slot.host is None:
                command = commands.here(spec, slot, inherited)
            else:
                carried = environment.for_another_machine(os.environ) | variables
                carried |= _secret(carried)
                path = carried.get("PYTHONPATH")
                command = commands.there(spec, slot, path, reports=board is not None)
            start = Start(
                rank=slot.rank,
                name=f"worker {slot.rank}/{len(slots)}",
                command=command,
                variables=variables,
                directory=spec.directory,
                log=log_file(spec.logs, number, slot.rank),
                carried=carried,
                inherited=inherited,
                reports=reports,
                told=None if board is None else partial(board.heard, slot.rank),
            )
            worker = Worker(start, screen, events)
            # The worker has its own copies.
            if opened is not None:
                opened.close()
            if reports is not None:
                os.close(inherited[-1])
            yield worker


def begin_others(
    spec: JobSpec, slots: Sequence[Slot], screen: Screen, events: queue.SimpleQueue[Event]
) -> Iterator[Worker]:
    """Starts the workers but rank 0, which this process then is, and yields each.

    All of them see all devices, as this process does.
    """
    coordinator, listener = open_coordinator(slots)
    assert listener is not None  # rank 0 is here
    of_job = environment.of_job(spec, 0)
    of_machine = environment.of_threads(len(slots))
    own, *others = (
        environment.of_worker(spec, slot, len(slots), coordinator, 0) | of_machine | of_job
        for slot in slots
    )
    for slot, variables in zip(slots[1:], others, strict=True):
        start = Start(
            rank=slot.rank,
            name=f"worker {slot.rank}/{len(slots)}",
            command=commands.here(spec, slot, must_join=True),  # this process waits for it
            variables=variables,
            directory=None,
            log=None,
        )
        yield Worker(start, screen, events)
    os.environ.update(own)
    os.environ[COORDINATOR_FD] = str(listener.detach())


def _secret(variables: Mapping[str, str]) -> dict[str, str]:
    """Returns the secret of a worker's variables or of this process's; none: it is in a file."""
    given = {**os.environ, **variables}.get(SECRET)
    return {SECRET: given} if given else {}


def log_file(folder: Path | None, attempt: int, rank: int) -> Path | None:
    """Returns a worker's log file, with its folder made."""
    if folder is None:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"attempt-{attempt}-worker-{rank}.log"
