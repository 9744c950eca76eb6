"""Ends a worker when another worker is lost.

A collective of a framework may wait for the lost worker forever, in code that no Python exception
reaches. First the main thread gets some seconds to end by itself, because usually it gets an error:
the framework reports a broken connection, or the next exchange with the other workers fails. After
these seconds the monitor ends the process, with the cause on standard error.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
import traceback
from types import FrameType, TracebackType
from typing import NoReturn, final

from kerasdist.errors import JobError, KerasdistError, WorkerLostError
from kerasdist.job import interruption
from kerasdist.job.client import Client
from kerasdist.job.coordinator import Coordinator
from kerasdist.job.interruption import ExitCode

# How many seconds the main thread has to end by itself, before the monitor ends the process.
GRACE_SECONDS = 10.0

# Takes the place of `GRACE_SECONDS` if Ctrl-C has interrupted the lost worker. That worker ends
# within `interruption.SECONDS`, which breaks its connections. The main thread's collective then
# fails, so the main thread ends by itself soon after.
AFTER_INTERRUPTION_SECONDS = 2 * interruption.SECONDS

# After an error of a framework, this worker waits this many seconds for a message that another
# worker is lost, because that loss may be the cause of the error.
NEWS_SECONDS = 5.0

# The chief delays its own end by at most this many seconds, to tell the others why the job ends.
_TELLING_SECONDS = 2.0

# An error from one of these modules may come from the loss of a worker.
_ENGINES = ("tensorflow", "jax", "jaxlib", "torch")

# The first words of a ValueError that JAX (0.10) raises if a compiled program fails, for example
# because a collective has lost a worker.
_STATUSES = (
    "UNKNOWN:",
    "UNAVAILABLE:",
    "INTERNAL:",
    "ABORTED:",
    "CANCELLED:",
    "DEADLINE_EXCEEDED:",
)


@final
class Monitor:
    """Ends this process if the job has ended and the main thread does not end by itself."""

    def __init__(self, client: Client, coordinator: Coordinator | None) -> None:
        self._client = client
        self._coordinator = coordinator
        self._disarmed = threading.Event()
        self._main = threading.main_thread()
        self._original = self._shown_by = sys.excepthook
        self._ending = self._interrupted = False
        sys.excepthook = self._uncaught
        threading.Thread(target=self._wait, name="kerasdist-monitor", daemon=True).start()

    def disarm(self) -> None:
        """Stops the monitor's thread, which would end this process after the job has failed."""
        self._disarmed.set()

    def end(self, failure: JobError) -> None:
        """Ends this process, whose script has ended and which only waits for the other workers.

        If `failure` says that another worker's script ended too early, this method only prints
        `failure`, and lets this script end with its own exit code.
        """
        if self._client.failure_kind == "left early":
            sys.stderr.write(f"{failure}\n")
            self.fail(None, 1)
            return
        self.disarm()
        self._end_with(failure, f"{failure}\n")

    def fail(self, why: str | None, code: int) -> None:
        """Tells the other workers why this worker ends; `why` is None if they already know.

        If this process has not ended after `GRACE_SECONDS`, it is ended with the exit code `code`.
        """
        self.disarm()
        self._leave_job(why, code)

    def hasten(self) -> None:
        """Limits the time of Python's shutdown, if Ctrl-C has interrupted this worker.

        A process that has started the other workers has no time limit.
        """
        if self._interrupted and not interruption.has_started_others():
            interruption.limit_interpreter()

    def put_hook_first(self) -> None:
        """Makes the monitor's hook `sys.excepthook` again, after a framework has replaced it.

        Otherwise PyTorch's hook would call the monitor's hook while standard error is redirected,
        and the user would see no message.
        """
        if sys.excepthook != self._uncaught:
            self._shown_by, sys.excepthook = sys.excepthook, self._uncaught

    def _wait(self) -> None:
        failure = None
        while failure is None:
            if self._disarmed.wait(0.2):
                return
            failure = self._client.failure
        interrupted = self._client.failure_kind == "interrupted"
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
        recorded = [f"Its last collectives: {one}\n" for one in self._client.last_collectives()]
        return "".join(["This worker was here:\n", *lines, *recorded])

    def _uncaught(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if self._ending:  # the framework's hook has called this hook again
            self._original(kind, error, trace)
            return
        self._ending = True
        interruption.ignore_more()
        self.disarm()
        interrupt = interruption.interrupt_behind(error)
        if interrupt is not None and _is_engines(error):
            said = interruption.described(interrupt, error)
            sys.stderr.write(f"{self._client.who} {said}\n")
            # A process that has started the other workers gets no time limit, because it waits
            # until they have ended.
            if not interruption.has_started_others():
                interruption.limit()
            self._interrupted = True
            self._leave_job(interruption.CTRL_C, _INTERRUPTED, interruption.SECONDS)
            return
        if isinstance(error, JobError) and self._client.failure_kind == "interrupted":
            self._end_with(error, interruption.described_wait(error, trace))
        self._shown_by(kind, error, trace)
        if isinstance(error, JobError) and self._client.failure is not None:
            # The process ends at once. In a normal exit, frameworks would wait for the lost worker.
            self._end_with(error, "")
        knows_of_loss = isinstance(error, WorkerLostError)
        if knows_of_loss or may_be_a_loss(error):
            # The worker that the error names may itself be waiting for the message that another
            # worker is lost. So this worker waits twice as long.
            failure = self._client.failure_within((1 + knows_of_loss) * NEWS_SECONDS)
            if failure is not None:
                self._end_with(failure, f"{failure}\n")
        self._leave_job(f"{kind.__name__}: {error}", 1)

    def _leave_job(self, why: str | None, code: int, grace: float = GRACE_SECONDS) -> None:
        self._client.close(error=why and why[:500])
        self._let_others_know()
        # A framework that waits for the other workers may keep this process from exiting. So a new
        # thread ends the process after `grace` seconds.
        threading.Thread(target=_end_later, args=(code, grace), daemon=True).start()

    def _end_with(self, failure: JobError, said: str) -> NoReturn:
        lost = isinstance(failure, WorkerLostError)
        advises = lost and self._client.failure_kind != "interrupted"
        sys.stderr.write(f"{said}{_ADVICE if advises else ''}")
        self._let_others_know()
        interruption.exit_now(ExitCode.LOST_WORKER if lost else 1)

    def _let_others_know(self) -> None:
        if self._coordinator is not None:
            self._coordinator.wait_until_told(_TELLING_SECONDS)


_INTERRUPTED = 128 + signal.SIGINT

_ADVICE = (
    "Start the job again (`kerasdist run --max-restarts N` does that); with "
    "kerasdist.callbacks.BackupAndRestore it goes on where the last backup was made.\n"
)


def may_be_a_loss(error: BaseException) -> bool:
    """Returns whether an error may come from a framework that has lost another worker."""
    if isinstance(error, KerasdistError):
        return False
    module = type(error).__module__.partition(".")[0]
    if isinstance(error, ValueError) and str(error).startswith(_STATUSES):
        return True
    return isinstance(error, RuntimeError | OSError) or module in _ENGINES


def _is_engines(error: BaseException) -> bool:
    """Returns whether Ctrl-C may be the cause of an error.

    The error may be the KeyboardInterrupt itself, or an error of kerasdist or of a framework.
    """
    return isinstance(error, KeyboardInterrupt | JobError) or may_be_a_loss(error)


def _end_later(code: int, seconds: float) -> NoReturn:
    time.sleep(seconds)
    interruption.exit_now(code)
