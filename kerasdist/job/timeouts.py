"""How long a worker waits for the others."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields

from kerasdist.errors import JobError


@dataclass(frozen=True)
class Timeouts:
    """How long a worker waits before it ends the job with an error; all in seconds.

    Attributes:
        join: For all workers to come, at the start.
        heartbeat: For a sign of life of a worker.
        meeting: For the others at a place that all must come to: a decision, the next step, the end
            of the script. Also how long an engine waits in a collective.
    """

    join: float = 300.0
    heartbeat: float = 60.0
    meeting: float = 600.0

    @property
    def beat(self) -> float:
        """Seconds from one sign of life to the next."""
        return min(1.0, self.heartbeat / 4)

    @classmethod
    def of_environment(cls, environ: Mapping[str, str] = os.environ) -> Timeouts:
        """Reads ``KERASDIST_JOIN_TIMEOUT``, ``_HEARTBEAT_TIMEOUT`` and ``_MEETING_TIMEOUT``."""
        given: dict[str, float] = {}
        for field in fields(cls):
            name = f"KERASDIST_{field.name.upper()}_TIMEOUT"
            text = environ.get(name)
            if text is None:
                continue
            try:
                seconds = float(text)
            except ValueError:
                seconds = 0.0
            if not seconds > 0:
                raise JobError(
                    f"Expected the variable {name} to be a positive number of seconds. "
                    f"Received: {name}={text!r}."
                )
            given[field.name] = seconds
        return cls(**given)
