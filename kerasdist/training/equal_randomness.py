"""Random states that agree on all workers, so that they shuffle data in the same order."""

from __future__ import annotations

import hashlib
import random
import secrets
from typing import TYPE_CHECKING

import keras
import numpy as np

from kerasdist import keras_seam
from kerasdist.job.job import Job

if TYPE_CHECKING:
    from kerasdist.backends.base import Backend


def ensure(job: Job, backend: Backend) -> None:
    """Lets all workers go on from the same random state. All workers must call it.

    Workers that were seeded alike, and have drawn alike since, stay as they are: their draws are
    those of one device. Otherwise all are seeded again, with a number that the chief drew.

    Args:
        job: The job.
        backend: The backend, which may have a generator of its own.
    """
    drawn = secrets.randbits(31) if job.is_chief else None
    everyone = job.exchange("random state", [_digest(backend), drawn])
    if len({digest for digest, _ in everyone}) > 1:
        keras.utils.set_random_seed(everyone[0][1])


def _digest(backend: Backend) -> str:
    """What stands for the state of all generators that shuffle data."""
    name, key, *rest = np.random.get_state()  # the one that Keras draws from
    numpy_state = (name, np.asarray(key).tobytes(), *rest)
    parts = (random.getstate(), numpy_state, keras_seam.global_seed(), backend.random_state())
    return hashlib.sha256(repr(parts).encode()).hexdigest()
