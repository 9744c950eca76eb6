"""How a worker ends when it is interrupted by Ctrl-C: with one line, and soon.

Most of the time goes into the end of the interpreter, which takes the framework's modules apart:
1 to 2 s on an idle machine, 6 s on a busy one (measured with TensorFlow and PyTorch, two workers).
No thread of Python's runs then that could end it, so a timer of the kernel's does.
"""

from __future__ import annotations

import contextlib
import gc
import io
import signal
import sys
import sysconfig
import threading
import traceback
from pathlib import Path
from types import FrameType, TracebackType

from kerasdist.errors import JobError

# With what a worker that was interrupted says goodbye.
CTRL_C = "Ctrl-C"

# How long a worker may take to end after it was interrupted, and how long the interpreter alone.
SECONDS = 2.0
_INTERPRETER_SECONDS = 1.0

# How long the code that has dropped an interrupt may take to end.
_AGAIN_SECONDS = 0.05

# Where no line of a user's script is.
_ELSEWHERE = (
    str(Path(__file__).parents[1]),
    sysconfig.get_path("stdlib"),
    sysconfig.get_path("purelib"),
    sysconfig.get_path("platlib"),
    "<",
)


def hear_what_is_dropped() -> None:
    """Interrupts the main thread again where an interrupt came in code that drops errors.

    A callback of the garbage collector is such code. JAX has one, and Keras imports JAX.
    """
    shown_by = sys.unraisablehook

    def hook(dropped: sys.UnraisableHookArgs) -> None:
        if not issubclass(dropped.exc_type, KeyboardInterrupt):
            shown_by(dropped)
            return
        again = threading.Timer(_AGAIN_SECONDS, _interrupt)
        again.daemon = True
        again.start()

    sys.unraisablehook = hook


def _interrupt() -> None:
    # To this very thread, since it may be waiting in a call of the system's.
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def interrupt_behind(error: BaseException) -> KeyboardInterrupt | None:
    """Returns the interrupt that an error is, or that it has come from; None if there is none.

    Args:
        error: An error that the script did not catch.
    """
    seen: set[int] = set()
    behind: BaseException | None = error
    while behind is not None and id(behind) not in seen:
        if isinstance(behind, KeyboardInterrupt):
            return behind
        seen.add(id(behind))
        behind = behind.__cause__ or behind.__context__
    return None


def described(interrupt: KeyboardInterrupt, error: BaseException) -> str:
    """Returns one line about an interrupt.

    Args:
        interrupt: The interrupt.
        error: With what the script ends: the interrupt, or what a framework made of it.
    """
    said = "interrupted (Ctrl-C)"
    said += _place(traceback.extract_tb(interrupt.__traceback__))
    if error is not interrupt:
        said += f"; then {type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
    return said


def described_wait(why: JobError, at: FrameType | TracebackType | None) -> str:
    """Returns one line about a worker that waited for one that was interrupted.

    Args:
        why: What has become of the other worker.
        at: Where this one's main thread is, or was.
    """
    if isinstance(at, TracebackType):
        frames = traceback.extract_tb(at)
    else:
        frames = traceback.extract_stack(at)
    return f"{why} This worker was waiting{_place(frames)}.\n"


def limit(seconds: float = SECONDS) -> None:
    """Ends this process in some seconds, whatever it is doing then. For the main thread.

    Args:
        seconds: How long it still has.
    """
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds)


def limit_interpreter() -> None:
    """Gives the end of the interpreter its time; files that the script left open are written."""
    for thing in gc.get_objects():
        if type(thing) in (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom):
            with contextlib.suppress(OSError, ValueError):  # it is closed, or a broken pipe
                thing.flush()
    limit(_INTERPRETER_SECONDS)


def _place(frames: traceback.StackSummary) -> str:
    own = [frame for frame in frames if not frame.filename.startswith(_ELSEWHERE)]
    return f" at {own[-1].filename}:{own[-1].lineno}" if own else ""
