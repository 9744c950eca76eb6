"""Starts the other workers of a script from the script itself, whose process becomes rank 0.

A thread of rank 0 does the work of a launcher: when one worker fails, the thread ends the other
workers and rank 0, with the same message and exit code as ``kerasdist run``.
Each worker's supervisor reads a pipe from rank 0, and ends the worker when the pipe closes. So no
worker outlives rank 0.
"""

from __future__ import annotations

import atexit
import os
import queue
import signal
import sys
import threading
from collections.abc import Sequence
from types import FrameType
from typing import final

from kerasdist.cli.launch import report
from kerasdist.cli.launch.job import Attempt
from kerasdist.cli.launch.placement import place
from kerasdist.cli.launch.spec import STOP_SECONDS, AttemptResult, JobSpec
from kerasdist.cli.launch.start import begin_others
from kerasdist.cli.launch.worker import Events, Held, Screen, Signalled, ThisProcess, Worker
from kerasdist.job import interruption
from kerasdist.job.interruption import ExitCode
from kerasdist.job.job import current_job


@final
class Ranks:
    """The workers of a script on this machine: this process as rank 0, and those that it starts."""

    def __init__(self, command: Sequence[str], devices: Sequence[str], variables: dict[str, str]):
        """Starts the workers, one per device.

        Args:
            command: The command that each worker runs.
            devices: The names of the devices, by rank.
            variables: More environment variables for all workers, including this process.

        Raises:
            OSError: If a worker cannot be started.
        """
        self._spec = JobSpec(command, len(devices), environment=variables)
        self._events: Events = queue.SimpleQueue()
        self._screen = Screen()
        self._self = ThisProcess(self._events)
        self._pid = os.getpid()
        self._result: AttemptResult | None = None
        self._others: list[Worker] = []
        self._screen.say(
            f"MirroredStrategy: {len(devices)} processes, one a device: {', '.join(devices)}. This "
            "process is worker 0"
        )
        slots = place(len(devices), ())
        try:
            for worker in begin_others(self._spec, slots, self._screen, self._events):
                self._others.append(worker)
        except BaseException:
            for worker in self._others:
                worker.kill()
            raise
        os.register_at_fork(after_in_child=self._let_go)
        self._watching = threading.Thread(target=self._watch, name="kerasdist-ranks", daemon=True)
        self._watching.start()
        interruption.register(self.finish)
        # Python calls exit functions in reverse order. The job registers its own exit function
        # later, so Python calls `_at_exit` after that function.
        atexit.register(self._at_exit)

    def pass_on_interrupts(self) -> None:
        """Lets Ctrl-C reach all workers, because a terminal sends it only to this process."""
        handler = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is not threading.main_thread() or not callable(handler):
            return

        def handle(number: int, frame: FrameType | None) -> None:
            self._events.put(Signalled(number))
            handler(number, frame)

        signal.signal(signal.SIGINT, handle)

    def finish(self, code: int) -> int:
        """Waits until the other workers have ended, and returns the exit code of the job.

        Args:
            code: The exit code of this process.
        """
        self._self.end(code)
        self._watching.join()
        return self._code(code)

    def _at_exit(self) -> None:
        if os.getpid() != self._pid:
            return
        # A script may have called sys.exit with an exit code, but Python does not tell an exit
        # function this code. So after sys.exit, the exit code of this process counts as 0.
        code = int(getattr(sys, "last_value", None) is not None)
        has_joined = current_job() is not None
        self._self.end(code if has_joined else 1)
        if (of_job := self.finish(code)) != code:
            interruption.end_process(of_job)

    def _watch(self) -> None:
        held: list[Held] = [self._self, *self._others]
        self._result = Attempt(held, self._events, STOP_SECONDS, chief_leads=True).run()
        if self._is_failure_of_another(self._self.exit_code):
            self._screen.say(report.of_attempt(self._result, self._spec, 0))
        if self._self.told_to_stop:
            interruption.end_process(self._code(self._self.exit_code))

    def _code(self, own: int) -> int:
        if self._is_failure_of_another(own):
            assert self._result is not None
            assert self._result.cause is not None
            return self._result.cause.exit_code
        return own

    def _is_failure_of_another(self, own: int) -> bool:
        """Returns whether the job ends because of another worker, and not because of this one."""
        cause = None if self._result is None else self._result.cause
        if cause is None or cause.rank == self._self.rank:
            return False
        if self._self.told_to_stop:
            return True
        return own in (0, ExitCode.LOST_WORKER) and cause.failed_by_itself

    def _let_go(self) -> None:
        for worker in self._others:
            worker.let_go()
