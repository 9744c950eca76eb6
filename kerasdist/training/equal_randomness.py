"""Random states that agree on all workers, so that they shuffle data in the same order."""

from __future__ import annotations

import hashlib
import secrets

from kerasdist.backends import random_states
from kerasdist.job.job import Job


def ensure(job: Job) -> None:
    """Sets equal random states on all workers. All workers must call it.

    Workers that were seeded alike, and have drawn alike since, keep their states: their draws are
    those of one device. Otherwise all are seeded with a number that the chief draws.
    """
    drawn = secrets.randbits(31) if job.is_chief else None
    digests = {library: _digest(state) for library, state in random_states.compared().items()}
    everyone = job.all_gather_object("random state", [digests, drawn])
    # A library that is not imported on all workers does not shuffle what they all read.
    common = set.intersection(*(set(theirs) for theirs, _ in everyone))
    if any(len({theirs[library] for theirs, _ in everyone}) > 1 for library in common):
        random_states.seed(everyone[0][1])


def _digest(state: object) -> str:
    return hashlib.sha256(repr(state).encode()).hexdigest()
