"""A source of the cluster: a program that describes it in environment variables."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import final

from kerasdist.cluster import ports
from kerasdist.cluster.membership import Membership
from kerasdist.cluster.variables import Variables
from kerasdist.errors import ClusterError


class Kind(enum.Enum):
    """What a source describes."""

    PROCESS = "process"
    """Of this very process: the program that set the variables started it, or gave it its rank."""

    PLACE = "place"
    """Of a task or pod, in which a launcher may have started several processes."""


@final
@dataclass(frozen=True)
class Absent:
    """A source that describes no cluster.

    Attributes:
        reason: Why, for people.
    """

    reason: str


@final
@dataclass(frozen=True)
class Source:
    """A program that describes a cluster in environment variables.

    Attributes:
        name: Its name, for messages.
        kind: What it describes.
        variables: The environment variables that it is read from.
        read: Reads them.
        hint: How to set the coordinator, where the source may not know it.
    """

    name: str
    kind: Kind
    variables: tuple[str, ...]
    read: Callable[[Variables], Membership | Absent]
    hint: str = f"Set {ports.COORDINATOR_VARIABLE}=host:port on every worker."

    def ask(self, environ: Mapping[str, str] | None) -> Membership | Absent:
        """Returns this process's place, or why the source describes none."""
        return self.read(Variables(environ, self.name))

    def membership(self, environ: Mapping[str, str] | None) -> Membership:
        """Returns this process's place; raises if the source has none, or no address of rank 0."""
        answer = self.ask(environ)
        if isinstance(answer, Absent):
            raise ClusterError(
                f"Expected the environment of a worker of {self.name}. Received: "
                f"{answer.reason} `kerasdist info` lists what each source sets."
            )
        if answer.coordinator is None and answer.num_workers > 1:
            raise ClusterError(
                f"Expected to know on which machine rank 0 is, which {self.name} does not tell. "
                f"Received: {ports.COORDINATOR_VARIABLE}=None, num_workers={answer.num_workers}, "
                f"local_workers={answer.local_workers}. {self.hint}"
            )
        return answer
