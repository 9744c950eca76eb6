"""The other workers of a script, started by the script itself, which is rank 0 of them.

What `kerasdist.launch.job` does beside the workers is done here in a thread of rank 0: when one
fails, the others end, rank 0 too, with the message and the exit code of ``kerasdist run``. The
workers' supervisors hold a pipe from rank 0, so that none outlives it.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import queue
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import final

from kerasdist.core.user_warnings import LIBRARIES
from kerasdist.job import interruption
from kerasdist.job.interruption import ExitCode
from kerasdist.job.job import current_job
from kerasdist.launch import report
from kerasdist.launch.job import Attempt
from kerasdist.launch.placement import place
from kerasdist.launch.spec import STOP_SECONDS, AttemptResult, JobSpec
from kerasdist.launch.start import begin_others
from kerasdist.launch.worker import Event, Held, Screen, Signalled, ThisProcess, Worker


def is_child() -> bool:
    """Returns whether multiprocessing has started this process, as data loaders do.

    While such a process imports the script, it has a mark by which multiprocessing itself refuses
    to start others, and does not know its parent yet.
    """
    this = multiprocessing.current_process()
    return multiprocessing.parent_process() is not None or getattr(this, "_inheriting", False)


def command() -> tuple[str, ...]:
    """Returns the command; the caller has found that there is one."""
    words = [sys.executable, *sys.orig_argv[1:]]
    main = sys.modules["__main__"]
    if main.__spec__ is None:  # a script, not a module; it may have left its first folder
        file = str(main.__file__)
        for index, word in enumerate(words[1:], start=1):
            if file == word or file.endswith(f"/{word}"):  # the user typed it relative to a folder
                words[index] = file
                break
    return tuple(words)


def why_not_again() -> str | None:
    """Returns why this process cannot be started again, None if it can."""
    file = getattr(sys.modules["__main__"], "__file__", None)
    if file is None or hasattr(sys, "ps1") or sys.flags.interactive or not Path(file).is_file():
        return "this is a notebook, an interactive interpreter or a program without a file"
    return None


def why_not_unasked() -> str | None:
    """Returns why starting this process again may not be what its user expects; None: it is."""
    file = str(getattr(sys.modules["__main__"], "__file__", ""))
    if file.startswith(LIBRARIES):
        return f"the program that runs here is not a script of yours, but {file}"
    return None


@final
class Ranks:
    """The other workers of this script, on this machine, and this process as rank 0 of them."""

    def __init__(self, command: Sequence[str], devices: Sequence[str], variables: dict[str, str]):
        """Starts the workers, one a device.

        Args:
            command: What each of them runs.
            devices: The names of the devices, by rank.
            variables: What they and this process have in their environment beyond the job's.

        Raises:
            OSError: If a worker cannot be started.
        """
        self._spec = JobSpec(command, len(devices), environment=variables)
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._screen = Screen(is_scripts=True)
        self._self = ThisProcess(self._events)
        self._pid = os.getpid()
        self._result: AttemptResult | None = None
        self._others: list[Worker] = []
        self._screen.say(
            f"MirroredStrategy: {len(devices)} processes, one a device: {', '.join(devices)}. This "
            "one is worker 0"
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
        atexit.register(self._at_exit)  # registered before the job's own, so it runs after that

    def pass_on_interrupts(self) -> None:
        """Lets Ctrl-C, which a terminal sends to this process alone, reach the others as well."""
        handler = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is not threading.main_thread() or not callable(handler):
            return

        def handle(number: int, frame: FrameType | None) -> None:
            self._events.put(Signalled(number))
            handler(number, frame)

        signal.signal(signal.SIGINT, handle)

    def finish(self, code: int) -> int:
        """Waits until the others have ended, and returns the exit code of the job.

        Args:
            code: This process's own.
        """
        self._self.end(code)
        self._watching.join()
        return self._code(code)

    def _at_exit(self) -> None:
        if os.getpid() != self._pid:
            return
        # Python does not tell the code of a sys.exit: it counts as 0, until the others tell more.
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
        """Returns whether another worker is why the job ends, not this one by its own code."""
        cause = None if self._result is None else self._result.cause
        if cause is None or cause.rank == self._self.rank:
            return False
        if self._self.told_to_stop:
            return True
        is_own_failure = own not in (0, ExitCode.LOST_WORKER)
        is_consequence = cause.exit_code in (ExitCode.LOST_WORKER, ExitCode.PREEMPTED)
        return not is_own_failure and not is_consequence

    def _let_go(self) -> None:
        for worker in self._others:
            worker.let_go()
