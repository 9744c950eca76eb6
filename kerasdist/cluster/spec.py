"""The tasks of a cluster, and their addresses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast, final

from kerasdist.errors import ClusterError


@final
class ClusterSpec:
    """The tasks of a cluster by job, in the manner of ``tf.train.ClusterSpec``.

    A job is a group of tasks of one type, such as ``"worker"``. An address is None where the
    environment tells how many workers there are, but not where.

    Example::

        spec = kd.cluster.ClusterSpec({"worker": ["host1:2222", "host2:2222"]})
        print(spec.num_tasks("worker"), spec.job_tasks("worker"))

    Source: https://www.tensorflow.org/api_docs/python/tf/train/ClusterSpec

    Args:
        cluster: Addresses ``host:port`` by job, a list or a mapping from the task's number; or
            another `ClusterSpec`.

    Raises:
        TypeError: If `cluster` is none of these.
    """

    def __init__(self, cluster: Any) -> None:
        if isinstance(cluster, ClusterSpec):
            cluster = cluster.as_dict()
        if not isinstance(cluster, Mapping):
            raise TypeError(
                "Expected a mapping from job to addresses, such as "
                f"{{'worker': ['host1:2222', 'host2:2222']}}. Received: cluster={cluster!r}. Of a "
                "tf.train.ClusterSpec take as_dict()."
            )
        given = cast("Mapping[Any, object]", cluster)
        self._tasks = {str(job): _addresses(str(job), tasks) for job, tasks in given.items()}

    @property
    def jobs(self) -> list[str]:
        """The names of the jobs."""
        return list(self._tasks)

    def as_dict(self) -> dict[str, list[str | None]]:
        """Returns the addresses by job."""
        return {job: list(tasks) for job, tasks in self._tasks.items()}

    def num_tasks(self, job_name: str) -> int:
        """Returns how many tasks a job has.

        Args:
            job_name: The job.

        Raises:
            ValueError: If there is no such job.
        """
        return len(self.job_tasks(job_name))

    def task_indices(self, job_name: str) -> list[int]:
        """Returns the numbers of a job's tasks.

        Args:
            job_name: The job.

        Raises:
            ValueError: If there is no such job.
        """
        return list(range(self.num_tasks(job_name)))

    def job_tasks(self, job_name: str) -> list[str | None]:
        """Returns the addresses of a job's tasks.

        Args:
            job_name: The job.

        Raises:
            ValueError: If there is no such job.
        """
        if job_name not in self._tasks:
            raise ValueError(
                f"Expected one of the jobs {self.jobs}. Received: job_name={job_name!r}"
            )
        return list(self._tasks[job_name])

    def task_address(self, job_name: str, task_index: int) -> str:
        """Returns the address of a task.

        Args:
            job_name: The job.
            task_index: The task's number.

        Raises:
            ValueError: If there is no such task, or its address is not known.
        """
        tasks = self.job_tasks(job_name)
        if not 0 <= task_index < len(tasks):
            raise ValueError(
                f"Expected a task from 0 to {len(tasks) - 1} of the job {job_name!r}. Received: "
                f"task_index={task_index!r}"
            )
        address = tasks[task_index]
        if address is None:
            raise ClusterError(
                "Expected the address of every worker to be known; the environment tells only how "
                f"many there are. Received: job_name={job_name!r}, task_index={task_index}. "
                "Workers exchange their addresses when the strategy is made."
            )
        return address

    def __bool__(self) -> bool:
        return bool(self._tasks)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ClusterSpec) and self._tasks == other._tasks

    def __hash__(self) -> int:
        return hash(tuple(sorted(self._tasks.items())))

    def __repr__(self) -> str:
        return f"ClusterSpec({self.as_dict()!r})"


def _addresses(job: str, tasks: object) -> tuple[str | None, ...]:
    if isinstance(tasks, Mapping):  # TensorFlow's sparse form: {number: address}
        given = dict(cast("Mapping[int, object]", tasks))
        if sorted(given) != list(range(len(given))):
            raise ClusterError(
                "Expected the tasks of a job to be numbered from 0 without a gap. Received: "
                f"{job}={given!r}"
            )
        tasks = [given[index] for index in range(len(given))]
    if isinstance(tasks, str) or not isinstance(tasks, Sequence):
        raise TypeError(f"Expected a list of addresses for a job. Received: {job}={tasks!r}")
    addresses = cast("Sequence[object]", tasks)
    return tuple(None if address is None else str(address) for address in addresses)
