"""Cluster resolvers: one for a cluster that a script describes, and one for each `Source`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, final

from kerasdist.cluster import cloud_tpu, kerasdist_variables, sources
from kerasdist.cluster.source import Membership, Source, Variables
from kerasdist.cluster.spec import ClusterSpec
from kerasdist.core.earlier_names import refuse_arguments, resolve


class ClusterResolver(ABC):
    """Tells a process which workers its job has, and which of these workers the process is.

    The class is modelled on ``tf.distribute.cluster_resolver.ClusterResolver``, and works on every
    backend. A strategy for several workers calls `detect`, unless it gets a resolver as an
    argument.

    Example::

        resolver = kd.cluster.detect()
        strategy = kd.MultiWorkerMirroredStrategy(resolver)

    Source:
    https://www.tensorflow.org/api_docs/python/tf/distribute/cluster_resolver/ClusterResolver
    """

    @abstractmethod
    def membership(self) -> Membership:
        """Returns this process's place in the job."""

    @property
    def task_type(self) -> str:
        """The type of this process's task: ``"chief"`` or ``"worker"``."""
        return self.membership().task_type

    @property
    def task_id(self) -> int:
        """The number of this process among the tasks of its type."""
        return self.membership().task_id

    @property
    def rank(self) -> int:
        """The number of this worker in the job, from 0: the chief first, then the other workers."""
        return self.membership().rank

    @property
    def num_workers(self) -> int:
        """How many workers the job has, including the chief."""
        return self.membership().num_workers

    @property
    def environment(self) -> str:
        """Always empty, as in TensorFlow outside of Google."""
        return ""

    @property
    def rpc_layer(self) -> str:
        """TensorFlow's protocol between workers; the other backends have their own protocols."""
        return "grpc"

    def cluster_spec(self) -> ClusterSpec:
        """Returns the tasks and their addresses; None for an address that is not known."""
        place = self.membership()
        tasks = place.addresses or (None,) * place.num_workers
        # Rank 0 is either a separate chief or the first worker. With a separate chief, the type of
        # rank 0 is "chief", and the numbers of all other tasks differ from their ranks.
        if place.task_type == "chief" or place.task_id != place.rank:
            return ClusterSpec({"chief": tasks[:1], "worker": tasks[1:]})
        return ClusterSpec({"worker": tasks})

    def master(
        self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None
    ) -> str:
        """Returns a task's address in TensorFlow's form, or "" in a job of one worker.

        Args:
            task_type: The type of the task; None for this process's type.
            task_id: The number of the task; None for this process's number.
            rpc_layer: The protocol to put before the address, as in ``grpc://``. None means the
                value of the property `rpc_layer`, and "" means the address alone.

        Raises:
            ValueError: If there is no such task, or its address is not known.
        """
        if self.num_workers == 1:
            return ""
        task_type = self.task_type if task_type is None else task_type
        task_id = self.task_id if task_id is None else task_id
        layer = self.rpc_layer if rpc_layer is None else rpc_layer
        address = self.cluster_spec().task_address(task_type, task_id)
        return f"{layer}://{address}" if layer else address

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: object = None
    ) -> dict[str, int]:
        """Returns how many accelerators this machine has, by kind, such as ``{"GPU": 8}``.

        This call starts the backend.

        Args:
            task_type: None or this process's type, because a process knows only its own machine.
            task_id: None, or this process's number.
            config_proto: Ignored; `tf.distribute`'s resolvers have this argument.

        Raises:
            ValueError: If the arguments name another task.
        """
        from kerasdist.backends import registry  # imported here, because it imports Keras

        place = self.membership()
        if (task_type or place.task_type, place.task_id if task_id is None else task_id) != (
            place.task_type,
            place.task_id,
        ):
            raise ValueError(
                f"Expected this process's own task, {place.task_type} {place.task_id}, because a "
                f"process knows only its own devices. Received: task_type={task_type!r}, "
                f"task_id={task_id!r}"
            )
        kinds = [device.kind.upper() for device in registry.current().accelerators()]
        return {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            return resolve("ClusterResolver", self, name)

    def __repr__(self) -> str:
        place = self.membership()
        return f"{type(self).__name__}(rank={place.rank}, num_workers={place.num_workers})"


@final
class SimpleClusterResolver(ClusterResolver):
    """A cluster that the script itself describes.

    ```python
    resolver = kd.cluster.SimpleClusterResolver(
        {"worker": ["host1:2222", "host2:2222"]}, task_type="worker", task_id=0
    )
    ```

    Example::

        spec = kd.cluster.ClusterSpec({"worker": ["host1:2222", "host2:2222"]})
        resolver = kd.cluster.SimpleClusterResolver(spec, task_type="worker", task_id=0)

    Source:
    https://www.tensorflow.org/api_docs/python/tf/distribute/cluster_resolver/SimpleClusterResolver

    Args:
        cluster_spec: The addresses by task type, as a `ClusterSpec` or a mapping.
        task_type: The type of this process.
        task_id: The number of this process among the tasks of its type.
        coordinator: ``host:port`` on the machine of rank 0, for kerasdist itself. None means
            ``KERASDIST_COORDINATOR``, if this variable is set, and otherwise rank 0's own address
            with a port that is larger by 1000.
        environ: The variables in which ``KERASDIST_COORDINATOR`` is looked up; None for
            ``os.environ``.
        **earlier: Arguments of ``tf.distribute``'s resolver, which raise an error.

    Raises:
        ClusterError: If the task is not in the cluster, or an address cannot be read.
        UnsupportedError: If the task is a parameter server or an evaluator.
    """

    def __init__(
        self,
        cluster_spec: Any,
        task_type: str = "worker",
        task_id: int = 0,
        coordinator: str | None = None,
        environ: Mapping[str, str] | None = None,
        **earlier: Any,
    ) -> None:
        refuse_arguments("SimpleClusterResolver", earlier)
        variables = Variables(environ, type(self).__name__)
        cluster = ClusterSpec(cluster_spec)
        self._membership = variables.task(cluster, task_type, task_id, coordinator)

    def membership(self) -> Membership:
        """Returns this process's place in the job."""
        return self._membership


SOURCES: dict[Source, type[EnvironmentResolver]] = {}
"""The resolver of each source, in the order of precedence: the order of the classes below."""


class EnvironmentResolver(ClusterResolver):
    """The cluster that a source describes by environment variables.

    Args:
        environ: The environment variables; None for this process's own.
        **earlier: Arguments of ``tf.distribute``'s resolvers, which raise an error.

    Raises:
        ClusterError: If variables are missing or wrong.
        UnsupportedError: If the task is a parameter server or an evaluator.
    """

    _source: ClassVar[Source]

    def __init_subclass__(cls, source: Source) -> None:
        cls._source = source
        SOURCES[source] = cls

    def __init__(self, environ: Mapping[str, str] | None = None, **earlier: Any) -> None:
        refuse_arguments("a resolver", earlier)
        self._membership = self._source.membership(environ)

    def membership(self) -> Membership:
        """Returns this process's place in the job."""
        return self._membership


@final
class KerasdistClusterResolver(EnvironmentResolver, source=kerasdist_variables.SOURCE):
    """The cluster that ``KERASDIST_WORKERS`` and ``KERASDIST_RANK`` describe."""


@final
class TFConfigClusterResolver(EnvironmentResolver, source=sources.TF_CONFIG):
    """The cluster that ``TF_CONFIG`` describes.

    Source:
    https://www.tensorflow.org/api_docs/python/tf/distribute/cluster_resolver/TFConfigClusterResolver
    """


@final
class TorchrunClusterResolver(EnvironmentResolver, source=sources.TORCHRUN):
    """The cluster that torchrun's variables describe."""


@final
class KerasClusterResolver(EnvironmentResolver, source=sources.KERAS):
    """The cluster that ``KERAS_DISTRIBUTION_*`` describes."""


@final
class JAXClusterResolver(EnvironmentResolver, source=sources.JAX):
    """The cluster that ``JAX_COORDINATOR_ADDRESS`` and JAX's other variables describe."""


@final
class SlurmClusterResolver(EnvironmentResolver, source=sources.SLURM):
    """The cluster of a Slurm step of several tasks.

    Source:
    https://www.tensorflow.org/api_docs/python/tf/distribute/cluster_resolver/SlurmClusterResolver
    """


# In the order of precedence, Slurm comes before MPI: `srun --mpi=pmi2` sets PMI's variables, too,
# but only Slurm's variables name the hosts.
@final
class OpenMPIClusterResolver(EnvironmentResolver, source=sources.OPEN_MPI):
    """The cluster of processes that Open MPI's ``mpirun`` has started."""


@final
class PMIClusterResolver(EnvironmentResolver, source=sources.PMI):
    """The cluster of processes that ``mpirun`` of MPICH, Intel MPI or a similar MPI has started."""


@final
class CloudTPUClusterResolver(EnvironmentResolver, source=cloud_tpu.SOURCE):
    """The cluster of the hosts of a Cloud TPU."""


@final
class SkyPilotClusterResolver(EnvironmentResolver, source=sources.SKYPILOT):
    """The cluster of the nodes of a SkyPilot task."""


@final
class KubernetesClusterResolver(EnvironmentResolver, source=sources.KUBERNETES):
    """The cluster of the pods of an indexed Kubernetes Job."""
