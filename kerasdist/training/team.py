"""The workers that try a training step together: all of them go on, or none does."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

from kerasdist.errors import JobError, ReplicaError
from kerasdist.job.job import Job

_LONGEST_MESSAGE = 500


@final
@dataclass(frozen=True, eq=False)
class Team:
    """The workers of a job, or this process alone.

    Attributes:
        job: The job; None: there are no other workers.
    """

    job: Job | None

    def everyone(self, label: str, value: Any) -> list[Any]:
        """Returns what all workers bring, by rank. All workers must call it.

        Args:
            label: What it is about, for messages.
            value: A small value that JSON can say.
        """
        return [value] if self.job is None else self.job.exchange(label, value)

    @contextmanager
    def all_do(self, label: str) -> Generator[None]:
        """Waits until all workers have done the work inside. All workers must enter it.

        Args:
            label: What to call the work in messages.

        Raises:
            ReplicaError: If it failed on another worker.
            Exception: What it raised on this one.
        """
        if self.job is None:
            yield
            return
        error = None
        try:
            yield
        except JobError:
            raise
        except Exception as own:  # noqa: BLE001 (raised below, when the others know it)
            error = own
        said = None if error is None else f"{type(error).__name__}: {error}"[:_LONGEST_MESSAGE]
        try:
            everyone = self.job.exchange(label, said)
        except JobError as lost:
            # The others wait in a collective of the step that has failed here.
            raise lost from error
        if error is not None:
            raise error
        for rank, what in enumerate(everyone):
            if what is not None:
                raise ReplicaError(
                    f"[worker {self.job.rank}/{self.job.num_workers}] Expected all workers to do "
                    f"this: {label}. Received: an error on worker {rank}: {what}. The output of "
                    "that worker has more of it."
                )
