"""The end of a worker that has started the others itself, and whose exit code is the job's."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from enum import IntEnum
from typing import NoReturn

_finish: list[Callable[[int], int]] = []


def register(finish: Callable[[int], int]) -> None:
    """Registers what ends the job: a function of this worker's exit code, returns the job's."""
    _finish.append(finish)


def has_started_others() -> bool:
    """Returns whether this process has started the other workers of its job."""
    return bool(_finish)


def exit_now(code: int) -> NoReturn:
    """Ends this process at once; if it has started the other workers, after they have ended."""
    for finish in _finish:
        code = finish(code)
    end_process(code)


def end_process(code: int) -> NoReturn:
    """Ends this process at once, after writing what it has printed."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class ExitCode(IntEnum):
    """Exit codes with a meaning of their own.

    Attributes:
        LOST_WORKER: The worker ended because another was lost. The launcher looks for that one.
        PREEMPTED: The worker was told to stop, and has backed up. This is not a failure, and the
            launcher does not start the job again: the scheduler that took the machine does.
    """

    LOST_WORKER = 75
    PREEMPTED = 76
