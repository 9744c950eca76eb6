"""Exit codes of a worker that mean more than success or failure."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes with a meaning of their own.

    Attributes:
        LOST_WORKER: The worker ended because another was lost. The launcher looks for that one.
        PREEMPTED: The worker was told to stop, and has backed up. This is not a failure, and the
            launcher does not start the job again: the scheduler that took the machine does.
    """

    LOST_WORKER = 75
    PREEMPTED = 76
