"""Lets all workers try a training step together: if it fails on one, it fails on all."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

from kerasdist.errors import JobError, ReplicaError
from kerasdist.job.job import Job

_LONGEST_MESSAGE = 500


@final
@dataclass(frozen=True, eq=False)
class TrialWorkers:
    """The workers of a job, or this process alone.

    Attributes:
        job: The job; None: this process is alone.
    """

    job: Job | None

    def everyone(self, label: str, value: Any) -> list[Any]:
        """Returns the values of all workers, by rank. All workers must call it."""
        return [value] if self.job is None else self.job.all_gather_object(label, value)

    def chosen(self, label: str, value: Any, choose: Callable[[list[Any]], Any]) -> Any:
        """Returns what the chief chooses of all workers' values. All workers must call it.

        The values may differ by worker: no worker but the chief gets them all.
        """
        if self.job is None:
            return choose([value])
        everyone = self.job.gather_object(label, value)
        own = choose(everyone) if self.job.is_chief else None
        return self.job.broadcast_object(f"what the chief chooses of {label}", own)

    @contextmanager
    def all_do(self, label: str) -> Generator[None]:
        """Waits for all workers at the end of the work inside. All workers must enter it."""
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
            everyone = self.job.all_gather_object(label, said)
        except JobError as lost:
            # The others are waiting in a collective of the step that has failed here.
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
