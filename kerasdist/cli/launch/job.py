"""Runs a job: ``kerasdist run`` as a library.

```python
from kerasdist.cli.launch.job import run_job
from kerasdist.cli.launch.spec import JobSpec, python_command

result = run_job(JobSpec(python_command("train.py"), workers=2))
assert result.exit_code == 0
```
"""

from __future__ import annotations

import contextlib
import math
import queue
import shutil
import signal
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, final

from kerasdist.cli.launch import live, report, start, traces
from kerasdist.cli.launch.elastic.slots import Slots
from kerasdist.cli.launch.elastic.warm import WarmProcesses
from kerasdist.cli.launch.live import Board
from kerasdist.cli.launch.placement import Slot, counted, open_coordinator, place
from kerasdist.cli.launch.spec import AttemptResult, JobResult, JobSpec
from kerasdist.cli.launch.worker import (
    Event,
    Events,
    Exited,
    Held,
    Screen,
    Signalled,
    Start,
    Waiting,
    Worker,
)
from kerasdist.job.interruption import ExitCode
from kerasdist.job.listening import COORDINATOR_FD

SETTLE_SECONDS = 0.5
"""After a failure the launcher waits this long before it ends the other workers.

In this time they may fail by themselves, too, so the message about the failure is more exact.
"""

LOST_SECONDS = 15.0
"""The launcher waits this long for the end of a worker that another worker reports as lost.

A failing worker first reports its failure to the other workers. The framework may then delay the
end of the failing worker, for as long as `kerasdist.job.monitor` allows.
"""

KILL_SECONDS = 3.0
"""A supervisor has this long to end its worker by SIGKILL, before the supervisor is ended too."""

OUTPUT_SECONDS = 2.0
"""The launcher waits this long for the rest of the output of workers that have ended."""

# The launcher waits at most this long until other machines have removed backups from /dev/shm.
_CLEANING_SECONDS = 10.0


@final
@dataclass
class Attempt:
    """One attempt to run a job, from the start of its workers until all of them have ended.

    Attributes:
        to_begin: An iterable that starts the workers one after another, and yields each.
        events: The queue of the workers' events.
        stop_seconds: How long workers have from SIGTERM to SIGKILL.
        number: The number of earlier attempts.
        chief_leads: Whether rank 0 has started the other workers. If so, the end of rank 0 ends the
            other workers. A signal to rank 0 is then passed on to all workers, but does not end the
            attempt, because the script may handle the signal and go on.
    """

    to_begin: Iterable[Held]
    events: Events
    stop_seconds: float
    number: int = 0
    chief_leads: bool = False

    def __post_init__(self) -> None:
        self._passed_on = self._makes_room = False
        self._workers: list[Held] = []
        self._signal: int | None = None
        self._stopped_twice = False
        # The next measure to end workers that still run, and the time for it. The time is infinity
        # as long as no measure is planned.
        self._next: Literal["stop", "kill", "kill supervisors"] = "stop"
        self._next_at = math.inf

    def run(self) -> AttemptResult:
        """Runs the workers until all have ended."""
        try:
            for worker in self.to_begin:
                self._workers.append(worker)
        except BaseException:
            self._next, self._next_at = "kill", 0.0
            self._finish()
            raise
        return self._finish()

    def _finish(self) -> AttemptResult:
        self._watch()
        deadline = time.monotonic() + OUTPUT_SECONDS
        endings = tuple(worker.ending(deadline) for worker in self._workers)
        return AttemptResult(endings, self._signal, self._stopped_twice, self._makes_room)

    def _watch(self) -> None:
        """Waits until all workers have ended; if one of them fails, ends the others."""
        running = {worker.rank for worker in self._workers}
        self._act()
        while running:
            event = self._next_event()
            if isinstance(event, Exited):
                running.discard(event.rank)
                self._on_exit(self._workers[event.rank])
            elif isinstance(event, Signalled):
                self._on_signal(event.number)
            elif isinstance(event, Waiting) and event.attempt == self.number:
                self._makes_room = True
                self._stop(signal.SIGTERM)
            self._act()

    def _next_event(self) -> Event | None:
        """Waits for an event; returns None when it is time to send the next signal to workers."""
        left = max(0.0, self._next_at - time.monotonic())
        try:
            return self.events.get(timeout=None if left == math.inf else left)
        except queue.Empty:
            return None

    def _on_exit(self, worker: Held) -> None:
        code = 0 if self._passed_on else worker.exit_code
        of_leader = self.chief_leads and worker.rank == 0
        if self._next != "stop" or (code == 0 and not of_leader):
            return
        # After most failures the other workers have SETTLE_SECONDS to end. They have more time in
        # three cases: rank 0 has ended well (0); a worker was preempted, and the others may still
        # save a backup; or a worker reports another one as lost, whose end may be delayed.
        slow = {0: self.stop_seconds, ExitCode.PREEMPTED: self.stop_seconds}
        slow[ExitCode.LOST_WORKER] = LOST_SECONDS
        self._next_at = min(self._next_at, time.monotonic() + slow.get(code, SETTLE_SECONDS))

    def _on_signal(self, number: int) -> None:
        if self.chief_leads:
            self._passed_on = True
            self._signal_all(number)
            return
        if self._signal is not None:  # a second signal ends the workers at once
            self._stopped_twice = True
            self._next, self._next_at = "kill", time.monotonic()
            return
        self._signal = number
        # SIGHUP (a closed terminal) is passed on as SIGTERM, because scripts handle SIGTERM.
        self._stop(signal.SIGTERM if number == signal.SIGHUP else number)

    def _act(self) -> None:
        """Sends SIGTERM or SIGKILL to workers, or ends their supervisors, if the time has come."""
        if time.monotonic() < self._next_at:
            return
        if self._next == "stop":
            self._stop(signal.SIGTERM)
        elif self._next == "kill":
            self._next, self._next_at = "kill supervisors", time.monotonic() + KILL_SECONDS
            for worker in self._running():
                worker.kill()
        else:
            self._next_at = math.inf
            for worker in self._running():
                worker.kill_supervisor()

    def _stop(self, number: int) -> None:
        if self._next == "stop":
            self._next, self._next_at = "kill", time.monotonic() + self.stop_seconds
            self._signal_all(number)

    def _signal_all(self, number: int) -> None:
        for worker in self._running():
            worker.stop(number)

    def _running(self) -> list[Held]:
        return [worker for worker in self._workers if worker.running]


_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@final
class Launcher:
    """Runs a job; another thread can stop the job by `stop`.

    Example::

        from kerasdist.cli.launch.job import Launcher
        from kerasdist.cli.launch.spec import JobSpec, python_command

        result = Launcher(JobSpec(command=python_command("train.py"), workers=2)).run()

    Args:
        spec: The description of the job.

    Raises:
        ClusterError: If the workers cannot be placed on the hosts.
        DeviceError: If there shall be one worker per GPU, but this machine has no GPU.
    """

    def __init__(self, spec: JobSpec) -> None:
        self._spec = counted(spec)
        self._events: Events = queue.SimpleQueue()
        self._screen = Screen()
        self._warm = WarmProcesses(self._spec, self._screen)
        self._slots = Slots(self._spec, self._events, self._screen)
        self._board = Board()

    def run(self) -> JobResult:
        """Runs the job, and restarts it after failures at most `max_restarts` times.

        If the main thread calls this method, the launcher handles SIGINT, SIGTERM and SIGHUP until
        the job has ended: it passes them on to the workers.

        Raises:
            OSError: If a worker cannot be started.
        """
        attempts: list[AttemptResult] = []
        failures, again = 0, ""
        with contextlib.ExitStack() as stack:
            if threading.current_thread() is threading.main_thread():
                for number in _PASSED_ON:
                    # A signal handler may call a SimpleQueue's `put` even while `get` runs.
                    before = signal.signal(number, lambda number, _: self.stop(number))
                    stack.callback(signal.signal, number, before)
            if self._spec.logs is not None:
                stack.enter_context(self._board.in_file(self._spec.logs))
            if self._spec.live:
                stack.enter_context(live.shown(self._board))
            stack.callback(self._remove_memory, attempts)
            stack.callback(self._warm.close)
            while True:
                slots = self._slots.choose()
                if attempts:
                    self._screen.say(f"{self._slots.describe()} ({again})")
                else:
                    self._screen.say(report.of_start(self._spec, slots))
                last = self._attempt(len(attempts), slots)
                self._screen.say(report.of_attempt(last, self._spec, len(attempts)))
                attempts.append(last)
                failures += last.failed
                if not (last.failed or last.grows) or failures > self._spec.max_restarts:
                    result = JobResult(tuple(attempts))
                    self._slots.end(result.exit_code)
                    return result
                self._slots.learn(last)
                restart = f"restart {failures} of {self._spec.max_restarts}"
                again = "no restart is counted" if last.grows else restart

    def _attempt(self, number: int, slots: Sequence[Slot]) -> AttemptResult:
        spec, board = self._spec, self._board
        board.begin_attempt(number, slots)
        if spec.profile is not None:
            traces.forget_old(spec.profile)
        workers = self._begin(number, slots)
        result = Attempt(workers, self._events, spec.stop_seconds, number).run()
        if spec.profile is not None:
            self._screen.say(traces.merge(spec.profile, len(slots)))
        for each in result.endings:
            board.ended(each.rank, each.exit_code)
        return result

    def _begin(self, number: int, slots: Sequence[Slot]) -> Iterator[Worker]:
        """Starts the workers of an attempt one after another, and yields each."""
        spec = self._spec
        is_watched = spec.live or spec.logs is not None or spec.min_workers is not None
        coordinator, listener = open_coordinator(slots)
        given = start.variables_of(spec, slots, coordinator, number)
        with listener or contextlib.nullcontext():
            for slot, variables in zip(slots, given, strict=True):
                orders, command = start.supervised(spec, slot, variables)
                orders["sends_reports"] = is_watched
                orders["warm"] = self._warm.name(slot)
                if slot.rank == 0 and listener is not None:
                    variables[COORDINATOR_FD] = str(listener.fileno())
                    orders["inherited"].append(listener.fileno())
                begun = Start(
                    rank=slot.rank,
                    name=f"worker {slot.rank}/{len(slots)}",
                    command=command,
                    orders=orders,
                    log=spec.logs and start.log_file(spec.logs, number, slot.rank),
                    told=partial(self._hear, number, slot.rank) if is_watched else None,
                    connection=slot.connection,
                )
                self._warm.take(slot, begun)
                yield Worker(begun, self._screen, self._events)

    def _hear(self, attempt: int, rank: int, line: bytes) -> None:
        """Tells the board, the slots and the warm processes what a worker has reported."""
        said = live.report_in(line)
        self._board.heard(rank, said)
        if "backup" in said:
            self._slots.heard_of_backup(attempt, *said["backup"])
        if "frameworks" in said:
            self._warm.start(said["frameworks"])

    def _remove_memory(self, attempts: Sequence[AttemptResult]) -> None:
        """Removes copies of backups from memory: a worker leaves them there if `fit` is cut off."""
        folder = start.memory_of(self._spec)
        shutil.rmtree(folder, ignore_errors=True)
        is_clean = len(attempts) == 1 and not attempts[0].exit_code
        slots = () if is_clean or not self._spec.hosts else place(None, self._spec.hosts)
        hosts = {slot.host for slot in slots if slot.host is not None}
        start.run_on(hosts, ("rm", "-rf", "--", folder), _CLEANING_SECONDS)

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Passes a signal on to the workers, and kills those that still run after `stop_seconds`.

        A second call kills the workers at once.

        Args:
            number: The signal.
        """
        self._events.put(Signalled(number))


def run_job(spec: JobSpec) -> JobResult:
    """Runs a job and returns how it has ended.

    Example::

        from kerasdist.cli.launch.job import run_job
        from kerasdist.cli.launch.spec import JobSpec, python_command

        result = run_job(JobSpec(command=python_command("train.py"), workers=2))
        print(result.exit_code)

    Args:
        spec: The description of the job.

    Raises:
        ClusterError: If the workers cannot be placed on the hosts.
        DeviceError: If there shall be one worker per GPU, but this machine has no GPU.
        OSError: If a worker cannot be started.
    """
    return Launcher(spec).run()
