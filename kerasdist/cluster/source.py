"""Classes for a process's membership of a job, and for reading it from environment variables."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

from kerasdist.cluster import addresses
from kerasdist.cluster.spec import ClusterSpec, place_of
from kerasdist.errors import ClusterError


@final
@dataclass(frozen=True)
class Membership:
    """A process's place in a job of several workers.

    Example::

        resolver = kd.cluster.detect()
        if resolver is not None:
            place = resolver.membership()
            print(f"worker {place.rank} of {place.num_workers}, says {place.source}")

    Attributes:
        task_type: ``"chief"`` or ``"worker"``, with the meaning of ``TF_CONFIG``.
        task_id: The number of the process among the tasks of its type.
        rank: The number of the process within the job, from 0: the chief first, then the workers.
        num_workers: How many workers the job has, including the chief.
        addresses: ``host:port`` of every rank; empty if the environment does not contain them.
        coordinator: ``host:port`` at which kerasdist can reach the process of rank 0; None if the
            environment does not contain it.
        source: The source of these facts, such as ``"TF_CONFIG"``.
        local_rank: This process's number among the workers on this machine; None if not known.
        local_workers: How many workers this machine has; None if the number is not known.
    """

    task_type: str
    task_id: int
    rank: int
    num_workers: int
    addresses: tuple[str, ...]
    coordinator: str | None
    source: str
    local_rank: int | None = None
    local_workers: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.num_workers:
            raise ClusterError(
                f"Expected a rank from 0 to {self.num_workers - 1}, in a job of "
                f"{self.num_workers}. Received: rank={self.rank}, from {self.source}."
            )
        if self.addresses and len(self.addresses) != self.num_workers:
            raise ClusterError(
                f"Expected an address for each of {self.num_workers} workers. Received: "
                f"addresses={list(self.addresses)}, from {self.source}."
            )
        if self.local_workers is not None and not 0 < self.local_workers <= self.num_workers:
            raise ClusterError(
                f"Expected from 1 to {self.num_workers} workers on this machine. Received: "
                f"local_workers={self.local_workers}, from {self.source}."
            )
        local = self.local_workers or self.num_workers
        if self.local_rank is not None and not 0 <= self.local_rank < local:
            raise ClusterError(
                f"Expected a number below {local} for the worker on this machine. Received: "
                f"local_rank={self.local_rank}, from {self.source}."
            )

    @property
    def is_chief(self) -> bool:
        """Whether this process has rank 0 and so writes the files."""
        return self.rank == 0


@final
@dataclass(frozen=True)
class Absent:
    """The answer of a source that describes no cluster.

    Attributes:
        reason: Why the source describes no cluster, for human readers.
    """

    reason: str


@final
class Variables:
    """The environment variables, with methods by which a source reads them.

    If a variable is missing or wrong, the error names the source.

    Attributes:
        all: All environment variables, not only those of the source.
    """

    def __init__(self, environ: Mapping[str, str] | None, source: str) -> None:
        self.all = os.environ if environ is None else environ
        self._source = source

    def has(self, *names: str) -> bool:
        """Returns whether all of `names` are set and not empty."""
        return all(self.all.get(name) for name in names)

    def text(self, name: str) -> str:
        """Returns the value of a variable that must be set."""
        text = self.all.get(name, "").strip()
        if not text:
            raise ClusterError(
                f"Expected the variable {name}, as other variables of {self._source} are set. "
                f"Received: {name}={self.all.get(name)!r}. Set it, or unset the others."
            )
        return text

    def integer(self, name: str) -> int:
        """Returns the value of a variable that must be a whole number, 0 or more."""
        text = self.text(name)
        if not text.isdecimal():
            raise ClusterError(
                f"Expected the variable {name} of {self._source} to be a whole number. "
                f"Received: {name}={text!r}."
            )
        return int(text)

    def optional_text(self, *names: str) -> str | None:
        """Returns the value of the first variable in `names` that is set, or None."""
        return next((self.text(name) for name in names if self.has(name)), None)

    def optional_integer(self, *names: str) -> int | None:
        """Returns the whole number in the first variable in `names` that is set, or None."""
        return next((self.integer(name) for name in names if self.has(name)), None)

    def local(self, rank: Sequence[str], workers: Sequence[str]) -> tuple[int | None, int | None]:
        """Returns the local rank and the number of local workers.

        Each of them is read from the first variable that is set, of those that `rank` and `workers`
        name.
        """
        return self.optional_integer(*rank), self.optional_integer(*workers)

    def coordinator(self, otherwise: str | None) -> str | None:
        """Returns ``KERASDIST_COORDINATOR`` if it is set, else `otherwise`."""
        if not self.has(addresses.COORDINATOR_VARIABLE):
            return otherwise
        text = self.text(addresses.COORDINATOR_VARIABLE)
        return addresses.join(*addresses.split(text, addresses.COORDINATOR_VARIABLE))

    def worker(
        self,
        rank: int,
        num_workers: int,
        coordinator: str | None,
        *,
        addresses: tuple[str, ...] = (),
        local: tuple[int | None, int | None] = (None, None),
    ) -> Membership:
        """Returns the membership of a process, for a source with workers but no separate chief.

        Args:
            rank: The rank of the process.
            num_workers: How many workers there are.
            coordinator: The coordinator's address, if ``KERASDIST_COORDINATOR`` is not set.
            addresses: The addresses of all ranks, if they are known.
            local: The process's number on its machine, and how many workers the machine has.
        """
        where = self.coordinator(coordinator)
        return Membership("worker", rank, rank, num_workers, addresses, where, self._source, *local)

    def task(
        self, cluster: ClusterSpec, task_type: str, task_id: int, coordinator: str | None = None
    ) -> Membership:
        """Returns the membership of a task in a cluster.

        Other programs listen at the cluster's addresses, so the coordinator gets another port,
        unless `coordinator` or ``KERASDIST_COORDINATOR`` is given.
        """
        rank, listed = place_of(cluster, task_type, task_id, self._source)
        if coordinator is None:
            coordinator = self.coordinator(addresses.coordinator_of(listed, self._source))
        count = len(listed)
        return Membership(task_type, task_id, rank, count, listed, coordinator, self._source)


@final
@dataclass(frozen=True)
class Source:
    """A program that describes a cluster in environment variables.

    Attributes:
        name: The name of the source in messages.
        needed: The environment variables that must be set; else the source describes no cluster.
        others: Further variables that the source reads.
        read: The function that reads the variables.
        hint: The advice in the error that is raised if the source does not know the coordinator.
        is_of_place: Whether the source describes a task or pod, in which a launcher may have
            started several processes. Otherwise the program that set the variables has started
            exactly this process, or has given it its rank.
    """

    name: str
    needed: tuple[str, ...]
    others: tuple[str, ...]
    read: Callable[[Variables], Membership | Absent]
    hint: str = f"Set {addresses.COORDINATOR_VARIABLE}=host:port on every worker."
    is_of_place: bool = False

    @property
    def variables(self) -> tuple[str, ...]:
        """All variables that the source reads."""
        return self.needed + self.others

    def ask(self, environ: Mapping[str, str] | None) -> Membership | Absent:
        """Returns this process's place in the job, or why the source describes no cluster."""
        variables = Variables(environ, self.name)
        if variables.has(*self.needed):
            return self.read(variables)
        *first, last = self.needed
        names = f"{', '.join(first)} and {last}" if first else last
        return Absent(f"{names} {('is not', 'are not both', 'are not all')[len(first)]} set.")

    def membership(self, environ: Mapping[str, str] | None) -> Membership:
        """Returns this process's place in the job.

        Raises:
            ClusterError: If the source describes no cluster, or does not name rank 0's machine.
        """
        answer = self.ask(environ)
        if isinstance(answer, Absent):
            raise ClusterError(
                f"Expected the environment of a worker of {self.name}. Received: "
                f"{answer.reason} `kerasdist info` lists what each source sets."
            )
        if answer.coordinator is None and answer.num_workers > 1:
            raise ClusterError(
                f"Expected the machine of rank 0 to be known; {self.name} does not name it. "
                f"Received: {addresses.COORDINATOR_VARIABLE}=None, "
                f"num_workers={answer.num_workers}, local_workers={answer.local_workers}. "
                f"{self.hint}"
            )
        return answer
