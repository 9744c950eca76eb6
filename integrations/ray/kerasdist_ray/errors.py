"""The errors of jobs on Ray."""

from __future__ import annotations

from typing import final

from kerasdist.errors import JobError


@final
class RayJobError(JobError):
    """A worker of a job on Ray failed.

    Example::

        try:
            run_on_ray(train, num_workers=4)
        except RayJobError as error:
            print(error)

    Attributes:
        rank: The worker that failed first.
        exit_code: Its exit code; 128 + n if signal n ended it.
    """

    def __init__(self, message: str, rank: int, exit_code: int) -> None:
        super().__init__(message)
        self.rank = rank
        self.exit_code = exit_code
