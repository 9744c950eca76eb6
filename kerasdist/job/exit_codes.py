"""What a worker says by its exit code, beyond success and failure."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes with a meaning of their own.

    Attributes:
        LOST_WORKER: The worker ended because another was lost. The launcher looks for that one.
        PREEMPTED: The worker was told to stop, and has backed up. It is no failure, and the job is
            not started again: whoever took the machine does that.
    """

    LOST_WORKER = 75
    PREEMPTED = 76
