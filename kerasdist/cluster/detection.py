"""Finds the cluster that environment variables describe.

`SOURCES` is in the order of precedence: the first source that describes a cluster counts, and the
others must agree with it. There is an exception: Slurm, SkyPilot, Kubernetes and Cloud TPU describe
a task, a node or a pod, in which a launcher may have started several workers. If one of these four
sources differs from a source that describes the process itself, the source for the process counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from kerasdist.cluster import kerasdist_variables
from kerasdist.cluster.resolver import SOURCES, ClusterResolver
from kerasdist.cluster.source import Absent, Membership, Source
from kerasdist.core.earlier_names import refuse_arguments
from kerasdist.errors import ClusterError, KerasdistError

Answer = Membership | Absent | KerasdistError
"""A source's answer: this process's place in a job, or why there is no job, or an error."""


def findings(environ: Mapping[str, str] | None = None) -> dict[Source, Answer]:
    """Returns the answer of each source for the environment, including errors."""
    found: dict[Source, Answer] = {}
    for source in SOURCES:
        try:
            found[source] = source.ask(environ)
        except KerasdistError as error:
            found[source] = error
    return found


def choose(found: Mapping[Source, Answer]) -> Source | None:
    """Returns the source whose description is used; None if no source describes a cluster."""
    told = [(source, answer) for source, answer in found.items() if not isinstance(answer, Absent)]
    of_process = [answer for source, answer in told if not source.is_of_place]
    # A launcher inside of a task or pod describes its own workers. If the description of the task
    # or pod differs from the launcher's description, only the launcher's is used.
    trusted = [
        (source, answer)
        for source, answer in told
        if not source.is_of_place or not any(_differ(answer, other) for other in of_process)
    ]
    for answer in (*of_process, *(answer for _, answer in trusted)):
        if isinstance(answer, KerasdistError):
            raise answer
    for source, answer in trusted[1:]:
        first, place = trusted[0]
        if _differ(place, answer):
            raise ClusterError(
                f"Expected one cluster in the environment. Received: {_described(first, place)}, "
                f"but {_described(source, answer)}. Unset the variables of one: "
                f"{', '.join(first.variables)}; or {', '.join(source.variables)}."
            )
    return trusted[0][0] if trusted else None


def detect(environ: Mapping[str, str] | None = None) -> ClusterResolver | None:
    """Finds the cluster that the environment variables describe.

    Example::

        resolver = kd.cluster.detect()
        print("no job" if resolver is None else resolver.membership())

    Args:
        environ: The environment variables; None for this process's own.

    Returns:
        The resolver of the cluster, or None if this process is the only one of its job, as with
        ``KERASDIST_CLUSTER=none``.

    Raises:
        ClusterError: If two sources contradict each other, or a source's variables are wrong.
        UnsupportedError: If this process shall be a parameter server or an evaluator.
    """
    if kerasdist_variables.is_independent(environ):
        return None
    source = choose(findings(environ))
    if source is None:
        kerasdist_variables.refuse_half_a_cluster(environ)
        return None
    found = SOURCES[source](environ)
    kerasdist_variables.refuse_another_number(environ, found.num_workers, source.name)
    return found if found.num_workers > 1 else None


def _differ(one: Membership | KerasdistError, other: Membership | KerasdistError) -> bool:
    """Returns whether two sources describe different clusters, or one of them has an error."""
    if isinstance(one, KerasdistError) or isinstance(other, KerasdistError):
        return True
    return (one.rank, one.num_workers) != (other.rank, other.num_workers)


def _described(source: Source, answer: Membership | KerasdistError) -> str:
    assert isinstance(answer, Membership)  # `choose` has already raised errors
    return f"{source.name} says rank={answer.rank}, num_workers={answer.num_workers}"


@final
class TPUClusterResolver(ClusterResolver):
    """The cluster of the hosts of this process's TPU; this machine alone if `detect` finds none.

    Example::

        resolver = kd.cluster_resolver.TPUClusterResolver(tpu="")
        strategy = kd.TPUStrategy(resolver)

    Source:
    https://www.tensorflow.org/api_docs/python/tf/distribute/cluster_resolver/TPUClusterResolver

    Args:
        tpu: Empty or ``"local"``, because a script runs on the TPU's own hosts.
        **given: Arguments by which ``tf.distribute``'s resolver finds a TPU elsewhere. They raise
            an error.

    Raises:
        UnsupportedError: If the arguments name a TPU elsewhere.
        ClusterError: If two sources contradict each other, or a source's variables are wrong.
    """

    def __init__(self, tpu: str | None = None, **given: Any) -> None:
        refuse_arguments("TPUClusterResolver", {"tpu": None if tpu == "local" else tpu, **given})
        found = detect()
        alone = Membership("worker", 0, 0, 1, (), None, type(self).__name__)
        self._membership = alone if found is None else found.membership()

    @classmethod
    def connect(cls, tpu: str | None = None, **given: Any) -> TPUClusterResolver:
        """Returns a resolver, and connects to no host: a strategy connects when it is made.

        Args:
            tpu: The same as for the class.
            **given: The same as for the class.
        """
        return cls(tpu, **given)

    def membership(self) -> Membership:
        """Returns this process's place in the job."""
        return self._membership
