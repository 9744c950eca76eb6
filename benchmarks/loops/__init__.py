"""The same training, by kerasdist and by hand; see multiworker.py.

Each module's functions take a `Task` and a `Place`, make model and data, and return the work of one
round: `task.steps` steps of training, each over a global batch of `task.batch` examples, of which a
worker computes its part. It returns the last loss.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from networks import Task


@dataclass(frozen=True)
class Place:
    """This worker's place in the job, and where the workers meet."""

    rank: int
    workers: int
    ports: tuple[int, ...]

    @classmethod
    def of_environment(cls) -> Place:
        ports = tuple(map(int, os.environ["BENCHMARK_PORTS"].split(",")))
        return cls(int(os.environ["KERASDIST_RANK"]), int(os.environ["KERASDIST_WORKERS"]), ports)

    def rows_of(self, task: Task) -> list[slice]:
        """Returns where this worker's rows of each global batch are in the task's data."""
        size = task.batch // self.workers
        begins = [step * task.batch + self.rank * size for step in range(task.steps)]
        return [slice(begin, begin + size) for begin in begins]
