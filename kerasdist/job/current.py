"""The one job of this process."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from kerasdist.cluster.membership import Membership
from kerasdist.errors import JobError
from kerasdist.job.job import Job
from kerasdist.job.timeouts import Timeouts

# What a step that is compiled, and called by nothing else of ours, is called in messages.
FUNCTION = "kerasdist.function"

_current: list[Job] = []

_ALONE = nullcontext()


def join(membership: Membership, facts: Mapping[str, Any]) -> tuple[Job, bool]:
    """Returns the job of this process, and whether it has just been joined.

    All workers must call it. A second strategy gets the job that the first one joined.

    Args:
        membership: This process's place.
        facts: What must be equal on all workers, such as versions.

    Raises:
        JobError: If the others cannot be reached, or this process is in another job already.
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


def explaining(place: str) -> AbstractContextManager[None]:
    """Returns a context that says in our words what a lost worker did to the work inside.

    Args:
        place: What to call the work in messages.
    """
    return _current[0].explaining(place) if _current else _ALONE
