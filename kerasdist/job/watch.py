"""What becomes of a worker when another one is lost.

A collective of a framework may wait for the lost worker for ever, in code that no exception of ours
can reach. So the main thread gets a moment to come to an end by itself: mostly the framework
reports a broken connection, or the worker comes to a meeting. Then the process ends, with the cause
on standard error.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from types import FrameType, TracebackType
from typing import NoReturn, final

from kerasdist.errors import JobError, KerasdistError, WorkerLostError
from kerasdist.job import interruption
from kerasdist.job.exit_codes import ExitCode
from kerasdist.job.hub import Hub
from kerasdist.job.link import Link
from kerasdist.job.script_exit import Failure

# How long the main thread may take to come to an end by itself.
GRACE_SECONDS = 10.0

# How long, if the worker that it waits for was interrupted by Ctrl-C: until that one has ended,
# which breaks its connections.
AFTER_INTERRUPTION_SECONDS = 2 * interruption.SECONDS

# How long an error of a framework waits for the news that explains it.
NEWS_SECONDS = 5.0

# How long the chief may take to let the others know why the job ends.
_TELLING_SECONDS = 2.0

# The frameworks whose errors may be a lost worker's.
_ENGINES = ("tensorflow", "jax", "jaxlib", "torch")

# How JAX begins a ValueError of its own, which it raises where it runs a program it knows (0.10).
_STATUSES = (
    "UNKNOWN:",
    "UNAVAILABLE:",
    "INTERNAL:",
    "ABORTED:",
    "CANCELLED:",
    "DEADLINE_EXCEEDED:",
)


@final
class Watch:
    """Ends this process when the job ends and its main thread does not."""

    def __init__(self, link: Link, hub: Hub | None) -> None:
        """Starts to watch.

        Args:
            link: The connection that brings the news.
            hub: On the chief, what tells the others.
        """
        self._link = link
        self._hub = hub
        self._disarmed = threading.Event()
        self._main = threading.main_thread()
        self._original = self._shown_by = sys.excepthook
        self._ending = self._interrupted = False
        sys.excepthook = self._uncaught
        interruption.hear_what_is_dropped()
        threading.Thread(target=self._wait, name="kerasdist-watch", daemon=True).start()

    def disarm(self) -> None:
        """Leaves the end to the main thread, which knows."""
        self._disarmed.set()

    def end(self, failure: JobError) -> None:
        """Ends this process, which has nothing left to do but to wait for the others.

        Args:
            failure: What ended the job.
        """
        self.disarm()
        self._end_with(failure, f"{failure}\n")

    def fail(self, failure: Failure) -> None:
        """Tells the others that this worker ends because it says so, and lets it end.

        Args:
            failure: What it says.
        """
        self.disarm()
        self._leave_in_the_lurch(failure.why, failure.code)

    def hasten(self) -> None:
        """Leaves little time to what comes after the job, if this worker was interrupted."""
        if self._interrupted:
            interruption.limit_interpreter()

    def come_first(self) -> None:
        """Hears of uncaught errors before a framework does that has put itself before us.

        PyTorch's hook lets ours run with standard error redirected; nothing would be seen of it.
        """
        if sys.excepthook != self._uncaught:
            self._shown_by, sys.excepthook = sys.excepthook, self._uncaught

    def _wait(self) -> None:
        failure = None
        while failure is None:
            if self._disarmed.wait(0.2):
                return
            failure = self._link.failure
        interrupted = self._link.interrupted
        if self._disarmed.wait(AFTER_INTERRUPTION_SECONDS if interrupted else GRACE_SECONDS):
            return
        if interrupted:
            self._end_with(failure, interruption.described_wait(failure, self._frame()))
        self._end_with(failure, f"{failure}\n{self._stack()}")

    def _frame(self) -> FrameType | None:
        return sys._current_frames().get(self._main.ident or 0)

    def _stack(self) -> str:
        frame = self._frame()
        lines = traceback.format_stack(frame)[-4:] if frame is not None else []
        return "".join(["This worker was here:\n", *lines])

    def _uncaught(
        self,
        kind: type[BaseException],
        error: BaseException,
        trace: TracebackType | None,
    ) -> None:
        if self._ending:  # the framework's hook, which ours has called, calls ours
            self._original(kind, error, trace)
            return
        self._ending = True
        self.disarm()
        interrupt = interruption.interrupt_behind(error)
        if interrupt is not None and _is_engines(error):
            said = interruption.described(interrupt, error)
            sys.stderr.write(f"{self._link.who} {said}\n")
            interruption.limit()
            self._interrupted = True
            self._leave_in_the_lurch(interruption.CTRL_C, _INTERRUPTED, interruption.SECONDS)
            return
        if isinstance(error, JobError) and self._link.interrupted:
            self._end_with(error, interruption.described_wait(error, trace))
        self._shown_by(kind, error, trace)
        if isinstance(error, JobError) and self._link.failure is not None:
            # Not by way of the interpreter's end: frameworks wait there for the lost worker.
            self._end_with(error, "")
        knows_of_loss = isinstance(error, WorkerLostError)
        if knows_of_loss or may_be_a_loss(error):
            # The lost one may wait itself for news of another.
            failure = self._link.failure_within((1 + knows_of_loss) * NEWS_SECONDS)
            if failure is not None:
                self._end_with(failure, f"{failure}\n")
        self._leave_in_the_lurch(f"{kind.__name__}: {error}", 1)

    def _leave_in_the_lurch(self, why: str, code: int, grace: float = GRACE_SECONDS) -> None:
        self._link.close(error=why[:500])
        self._let_others_know()
        # What they wait for may keep this worker from its end.
        threading.Thread(target=_end_later, args=(code, grace), daemon=True).start()

    def _end_with(self, failure: JobError, said: str) -> NoReturn:
        lost = isinstance(failure, WorkerLostError)
        sys.stderr.write(f"{said}{_ADVICE if lost and not self._link.interrupted else ''}")
        self._let_others_know()
        _end(ExitCode.LOST_WORKER if lost else 1)

    def _let_others_know(self) -> None:
        if self._hub is not None:
            self._hub.wait_until_told(_TELLING_SECONDS)


_INTERRUPTED = 128 + signal.SIGINT

_ADVICE = (
    "Start the job again (`kerasdist run --max-restarts N` does that); with "
    "kerasdist.callbacks.BackupAndRestore it goes on where the last backup was made.\n"
)


def may_be_a_loss(error: BaseException) -> bool:
    """Returns whether an error may come from a framework that has lost another worker.

    Args:
        error: The error.
    """
    if isinstance(error, KerasdistError):
        return False
    module = type(error).__module__.partition(".")[0]
    if isinstance(error, ValueError) and str(error).startswith(_STATUSES):
        return True
    return isinstance(error, RuntimeError | OSError) or module in _ENGINES


def _is_engines(error: BaseException) -> bool:
    """Whether an interrupt or its consequence, rather than a mistake in the user's own cleanup."""
    return isinstance(error, KeyboardInterrupt | JobError) or may_be_a_loss(error)


def _end_later(code: int, seconds: float) -> NoReturn:
    time.sleep(seconds)
    _end(code)


def _end(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
