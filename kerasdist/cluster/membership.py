"""What a process knows of its place in a job."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

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
        task_type: ``"chief"`` or ``"worker"``, as ``TF_CONFIG`` means it.
        task_id: The number within the type.
        rank: The number within the job, from 0: the chief first, then the workers.
        num_workers: How many workers there are, the chief among them.
        addresses: ``host:port`` of every rank; empty where the environment does not tell.
        coordinator: ``host:port`` at which the process of rank 0 can be reached by kerasdist; None
            where the environment does not tell.
        source: The source of these facts, such as ``"TF_CONFIG"``.
        local_rank: The number among the workers on this machine; None where it is not known.
        local_workers: How many workers this machine has; None where it is not known.
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
        if self.local_rank is not None and not 0 <= self.local_rank < (
            self.local_workers or self.num_workers
        ):
            raise ClusterError(
                f"Expected a number below {self.local_workers or self.num_workers} for the worker "
                f"on this machine. Received: local_rank={self.local_rank}, from {self.source}."
            )

    @property
    def is_chief(self) -> bool:
        """Whether this process writes the files: it has rank 0."""
        return self.rank == 0
