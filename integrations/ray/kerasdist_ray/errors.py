"""What goes wrong on Ray."""

from __future__ import annotations

from typing import final

from kerasdist.errors import JobError


@final
class RayJobError(JobError):
    """A job on Ray has not succeeded.

    Attributes:
        rank: The worker that failed first.
        exit_code: Its exit code; 128 + n if signal n ended it.
    """

    def __init__(self, message: str, rank: int, exit_code: int) -> None:
        super().__init__(message)
        self.rank = rank
        self.exit_code = exit_code
