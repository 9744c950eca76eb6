"""The tasks of a cluster with their addresses, and the rank of a task, as in ``TF_CONFIG``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast, final

from kerasdist.cluster import addresses
from kerasdist.errors import ClusterError, UnsupportedError

_INSTEAD = {
    "ps": "kerasdist has no parameter servers: every worker holds the variables. Give a cluster of "
    "chief and workers to a strategy for several workers.",
    "evaluator": "kerasdist evaluates on the workers: give validation_data to fit, or start a "
    "process outside of the cluster that loads the checkpoints and calls evaluate.",
}


@final
class ClusterSpec:
    """The tasks of a cluster by job, modelled on ``tf.train.ClusterSpec``.

    A job is a group of tasks of one type, such as ``"worker"``. An address is None if
    the environment variables give only the number of workers.

    Example::

        spec = kd.cluster.ClusterSpec({"worker": ["host1:2222", "host2:2222"]})
        print(spec.num_tasks("worker"), spec.job_tasks("worker"))

    Source: https://www.tensorflow.org/api_docs/python/tf/train/ClusterSpec

    Args:
        cluster: For each job, the addresses ``host:port`` of its tasks: a list, or a mapping from
            the numbers of the tasks to their addresses. Or another `ClusterSpec`.

    Raises:
        TypeError: If `cluster` has another form.
    """

    def __init__(self, cluster: Any) -> None:
        if hasattr(cluster, "as_dict"):  # a ClusterSpec of kerasdist or of TensorFlow
            cluster = cluster.as_dict()
        if not isinstance(cluster, Mapping):
            raise TypeError(
                "Expected a mapping from job to addresses, such as "
                f"{{'worker': ['host1:2222', 'host2:2222']}}. Received: cluster={cluster!r}."
            )
        given = cast("Mapping[Any, object]", cluster)
        self._tasks = {str(job): _addresses(str(job), tasks) for job, tasks in given.items()}

    @property
    def jobs(self) -> list[str]:
        """The names of the jobs, which are types of tasks such as ``"worker"``."""
        return list(self._tasks)

    def as_dict(self) -> dict[str, list[str | None]]:
        """Returns the addresses by job."""
        return {job: list(tasks) for job, tasks in self._tasks.items()}

    def num_tasks(self, job_name: str) -> int:
        """Returns how many tasks a job has.

        Args:
            job_name: The name of the job.

        Raises:
            ValueError: If there is no such job.
        """
        return len(self.job_tasks(job_name))

    def task_indices(self, job_name: str) -> list[int]:
        """Returns the numbers of a job's tasks.

        Args:
            job_name: The name of the job.

        Raises:
            ValueError: If there is no such job.
        """
        return list(range(self.num_tasks(job_name)))

    def job_tasks(self, job_name: str) -> list[str | None]:
        """Returns the addresses of a job's tasks.

        Args:
            job_name: The name of the job.

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
            job_name: The name of the job.
            task_index: The number of the task.

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
                "Expected the address of every worker to be known; the environment has only their "
                f"number. Received: job_name={job_name!r}, task_index={task_index}. "
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
    if isinstance(tasks, Mapping):  # TensorFlow's sparse form {number: address}
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


def place_of(
    cluster: ClusterSpec, task_type: str, task_id: int, source: str
) -> tuple[int, tuple[str, ...]]:
    """Returns the rank of a task, and the addresses of all tasks by rank; the chief has rank 0."""
    refused = task_type if task_type in _INSTEAD else "ps" if "ps" in cluster.jobs else None
    if refused is not None:
        raise UnsupportedError(
            f"Expected a cluster of chief and workers, from {source}. Received: "
            f"task_type={task_type!r}, jobs={cluster.jobs}. {_INSTEAD[refused]}"
        )
    unknown = sorted({task_type, *cluster.jobs} - {"chief", "worker", "evaluator"})
    if unknown:
        raise ClusterError(
            f"Expected tasks of the types 'chief' and 'worker', from {source}. Received: "
            f"task_type={task_type!r}, jobs={cluster.jobs}. Rename {unknown[0]!r}."
        )
    sizes = {job: cluster.num_tasks(job) for job in ("chief", "worker") if job in cluster.jobs}
    if sizes.get("chief", 0) > 1:
        raise ClusterError(
            f"Expected one chief at most, from {source}. Received: chief="
            f"{cluster.job_tasks('chief')}. Make the others workers."
        )
    if not 0 <= task_id < sizes.get(task_type, 0):
        raise ClusterError(
            f"Expected this process's task to be in the cluster, from {source}. Received: "
            f"task_type={task_type!r}, task_id={task_id}, cluster={cluster.as_dict()}."
        )
    listed = tuple(
        cluster.task_address(job, index) for job, size in sizes.items() for index in range(size)
    )
    for address in listed:
        addresses.split(address, source)
    repeated = sorted({address for address in listed if listed.count(address) > 1})
    if repeated:
        raise ClusterError(
            f"Expected every task at an address of its own, from {source}. "
            f"Received: {repeated[0]!r} more than once, in cluster={cluster.as_dict()}."
        )
    return task_id + (sizes.get("chief", 0) if task_type == "worker" else 0), listed
