"""Runs a job: ``kerasdist run`` as a library.

```python
from kerasdist.launch.job import run_job
from kerasdist.launch.spec import JobSpec, python_command

result = run_job(JobSpec(python_command("train.py"), workers=2))
assert result.exit_code == 0
```
"""

from __future__ import annotations

import contextlib
import queue
import signal
import threading
from collections.abc import Generator
from types import FrameType
from typing import final

from kerasdist.launch import report, traces
from kerasdist.launch.attempt import Attempt
from kerasdist.launch.beginning import begin
from kerasdist.launch.board import Board
from kerasdist.launch.output import Screen
from kerasdist.launch.placement import place
from kerasdist.launch.spec import AttemptResult, JobResult, JobSpec
from kerasdist.launch.worker import Event, Signalled
from kerasdist.launch.worker_count import counted

_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@final
class Launcher:
    """Runs a job, and can be told to stop from another thread.

    Example::

        from kerasdist.launch.job import Launcher
        from kerasdist.launch.spec import JobSpec, python_command

        result = Launcher(JobSpec(command=python_command("train.py"), workers=2)).run()

    Args:
        spec: The job.

    Raises:
        ClusterError: If the workers cannot be placed.
        DeviceError: If there is to be a worker a GPU, and there is none.
    """

    def __init__(self, spec: JobSpec) -> None:
        self._spec = counted(spec)
        self._slots = place(self._spec.workers, spec.hosts)
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._screen = Screen()
        watched = spec.live or spec.logs is not None
        self._board = Board(self._slots, spec.logs) if watched else None

    def run(self) -> JobResult:
        """Runs the job, again where that is allowed, until it has ended.

        In the main thread, SIGINT, SIGTERM and SIGHUP are passed on to the workers meanwhile.

        Raises:
            OSError: If a worker cannot be started.
        """
        attempts: list[AttemptResult] = []
        self._screen.say(report.of_start(self._spec, self._slots))
        with self._signals(), self._view():
            while True:
                number = len(attempts)
                attempts.append(self._attempt(number))
                self._screen.say(report.of_attempt(attempts[-1], self._spec, len(attempts) - 1))
                if not attempts[-1].failed or len(attempts) > self._spec.max_restarts:
                    return JobResult(tuple(attempts))
                self._screen.say(
                    f"starting the job again, {len(attempts)} of {self._spec.max_restarts}"
                )

    def _attempt(self, number: int) -> AttemptResult:
        board = self._board
        if board is not None and number:
            board.begin_attempt()
        if self._spec.profile is not None:
            traces.forget_old(self._spec.profile)
        workers = begin(self._spec, self._slots, number, self._screen, self._events, board=board)
        result = Attempt(workers, self._events, self._spec.stop_seconds).run()
        if self._spec.profile is not None:
            self._screen.say(traces.merge(self._spec.profile, len(self._slots)))
        if board is not None:
            for each in result.endings:
                board.ended(each.rank, each.exit_code)
            board.write(at_last=True)
        return result

    @contextlib.contextmanager
    def _view(self) -> Generator[None]:
        """Shows the live view, if it is wanted, below what else is on the terminal."""
        if self._board is None or not self._spec.live:
            yield
            return
        from kerasdist.launch import live

        console = live.console()
        with self._screen.above(console), live.shown(self._board, console):
            yield

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Passes a signal on to the workers, and SIGKILL when their time is over.

        Args:
            number: The signal. A second call ends them at once.
        """
        self._events.put(Signalled(number))

    @contextlib.contextmanager
    def _signals(self) -> Generator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        # SimpleQueue.put may be called in a handler, which the queue's own `get` is waiting under.
        def handle(number: int, _: FrameType | None) -> None:
            self.stop(number)

        before = {number: signal.signal(number, handle) for number in _PASSED_ON}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def run_job(spec: JobSpec) -> JobResult:
    """Runs a job, and returns how it has ended.

    Example::

        from kerasdist.launch.job import run_job
        from kerasdist.launch.spec import JobSpec, python_command

        result = run_job(JobSpec(command=python_command("train.py"), workers=2))
        print(result.exit_code)

    Args:
        spec: The job.

    Raises:
        ClusterError: If the workers cannot be placed.
        DeviceError: If there is to be a worker a GPU, and there is none.
        OSError: If a worker cannot be started.
    """
    return Launcher(spec).run()
