"""The job of this process; there is at most one."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

from kerasdist.cluster.source import Membership
from kerasdist.errors import JobError
from kerasdist.job.job import Job
from kerasdist.job.timeouts import Timeouts

# The name in messages of a compiled step outside of `fit` and `strategy.run`.
FUNCTION = "kerasdist.function"

_current: list[Job] = []

_ALONE = nullcontext()


def join(membership: Membership, facts: Mapping[str, object]) -> tuple[Job, bool]:
    """Returns the job of this process, and whether it was joined just now.

    All workers must call it. A second strategy gets the job that the first one joined.
    """
    if _current:
        if _current[0].membership != membership:
            raise JobError(
                "Expected one job for all strategies of a process. Received: "
                f"{membership}, after {_current[0].membership}. Make them with the same resolver."
            )
        return _current[0], False
    job = Job(membership, facts, Timeouts.of_environment())
    _current.append(job)
    return job, True


def current() -> Job | None:
    """Returns the job of this process, None if it is alone."""
    return _current[0] if _current else None


def translating_failures(place: str) -> AbstractContextManager[None]:
    """Returns a context that raises WorkerLostError in place of errors that a loss causes."""
    return _current[0].translating_failures(place) if _current else _ALONE
