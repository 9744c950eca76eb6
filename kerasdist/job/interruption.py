"""The exit codes of workers, and how workers end quickly, with one line of output, after Ctrl-C.

Most of the time that a worker takes to end is the shutdown of the interpreter, which unloads the
framework's modules: 1 to 2 s on an idle machine, 6 s on a busy one (measured with TensorFlow and
PyTorch, two workers). During the shutdown no Python thread runs that could end the process sooner,
so a timer of the kernel ends the process.
"""

from __future__ import annotations

import contextlib
import gc
import io
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from enum import IntEnum
from types import FrameType, TracebackType
from typing import NoReturn, final

from kerasdist.core.user_warnings import LIBRARIES, PACKAGE
from kerasdist.errors import JobError

# An interrupted worker tells the coordinator this text as its reason for leaving the job.
CTRL_C = "Ctrl-C"

# How many seconds an interrupted worker may take to end, and how many Python's shutdown may take.
SECONDS = 2.0
_INTERPRETER_SECONDS = 1.0

# Beginnings of names of files that do not belong to the user's script.
_ELSEWHERE = ("<", *LIBRARIES)


@final
class DroppedInterrupts:
    """Raises a KeyboardInterrupt again if the code that it interrupted has dropped it.

    Python drops errors in callbacks of the garbage collector (JAX has one, and Keras imports JAX).
    The C++ code of JAX and NumPy drops errors in conversions. An interrupt was dropped if it came
    in a call of Keras or kerasdist, and that call continues or returns. An interrupt that came in
    user code inside of that call is not raised again, because the code may have caught it itself.
    """

    def __init__(self, is_in_a_call: Callable[[], bool]) -> None:
        """Listens for interrupts in the main thread, unless the script handles Ctrl-C itself.

        `is_in_a_call` returns whether the main thread is in a call of Keras or kerasdist that needs
        all workers.
        """
        self._is_in_a_call = is_in_a_call
        self._dropped = False
        self._shown_by = sys.unraisablehook
        sys.unraisablehook = self._hear_what_python_drops
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._handle)

    def raise_again(self) -> None:
        """Raises a dropped KeyboardInterrupt again.

        The main thread calls this method when a step begins, and at the end of a call of Keras or
        kerasdist.
        """
        if self._dropped:
            self._dropped = False
            raise KeyboardInterrupt

    def forget(self) -> None:
        """Forgets an interrupt that came in a call, after the call has returned or failed."""
        self._dropped = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._dropped = self._is_in_a_call() and not _is_in_users_code(frame)
        signal.default_int_handler(number, frame)

    def _hear_what_python_drops(self, dropped: sys.UnraisableHookArgs) -> None:
        if issubclass(dropped.exc_type, KeyboardInterrupt):
            self._dropped = True
        else:
            self._shown_by(dropped)


def _is_in_users_code(frame: FrameType | None) -> bool:
    """Returns whether a frame belongs to user code, or to a library that user code has called.

    Returns False if the frame belongs to kerasdist, or to a library that kerasdist has called.
    """
    while frame is not None and frame.f_code.co_filename.startswith(_ELSEWHERE):
        if frame.f_code.co_filename.startswith(PACKAGE):
            return False
        frame = frame.f_back
    return True


def interrupt_behind(error: BaseException) -> KeyboardInterrupt | None:
    """Returns the KeyboardInterrupt among an error and its causes; None if there is none."""
    seen: set[int] = set()
    behind: BaseException | None = error
    while behind is not None and id(behind) not in seen:
        if isinstance(behind, KeyboardInterrupt):
            return behind
        seen.add(id(behind))
        behind = behind.__cause__ or behind.__context__
    return None


def described(interrupt: KeyboardInterrupt, error: BaseException) -> str:
    """Returns one line about an interrupt: the interrupted line, and the error that followed."""
    said = "interrupted (Ctrl-C)"
    # If a framework turns the interrupt into another error, only the traceback of that error
    # contains user code.
    traces = (traceback.extract_tb(one.__traceback__) for one in (interrupt, error))
    said += next(filter(None, map(_place, traces)), "")
    if error is not interrupt:
        said += f"; then {type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
    return said


def described_wait(why: JobError, at: FrameType | TracebackType | None) -> str:
    """Returns one line about a worker that waited for an interrupted worker."""
    if isinstance(at, TracebackType):
        frames = traceback.extract_tb(at)
    else:
        frames = traceback.extract_stack(at)
    return f"{why} This worker was waiting{_place(frames)}.\n"


def ignore_more() -> None:
    """Ignores further interrupts while the process ends, if this is the main thread."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def limit(seconds: float = SECONDS) -> None:
    """Ends this process after `seconds`, whatever runs then. Only the main thread may call this."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds)


def limit_interpreter() -> None:
    """Flushes the files that the script left open, and limits the time of Python's shutdown."""
    for thing in gc.get_objects():
        if type(thing) in (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom):
            # a stream may be closed, or its reader has ended
            with contextlib.suppress(OSError, ValueError):
                thing.flush()
    limit(_INTERPRETER_SECONDS)


def _place(frames: traceback.StackSummary) -> str:
    own = [frame for frame in frames if not frame.filename.startswith(_ELSEWHERE)]
    return f" at {own[-1].filename}:{own[-1].lineno}" if own else ""


_finish: list[Callable[[int], int]] = []


def register(finish: Callable[[int], int]) -> None:
    """Registers a function to end the job: from this worker's exit code it returns the job's."""
    _finish.append(finish)


def has_started_others() -> bool:
    """Returns whether this process has started the other workers of its job."""
    return bool(_finish)


def exit_now(code: int) -> NoReturn:
    """Ends this process at once, or after the other workers if it has started them."""
    for finish in _finish:
        code = finish(code)
    end_process(code)


def end_process(code: int) -> NoReturn:
    """Writes the output that is still in buffers, and then ends this process at once."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class ExitCode(IntEnum):
    """Exit codes that have a special meaning.

    Attributes:
        LOST_WORKER: The worker ended because another worker was lost. The launcher then looks
            for that other worker, whose loss is the cause.
        PREEMPTED: The worker was told to stop, and has saved a backup. This is not a failure, and
            the launcher does not restart the job; the scheduler that took the machine restarts it.
    """

    LOST_WORKER = 75
    PREEMPTED = 76
