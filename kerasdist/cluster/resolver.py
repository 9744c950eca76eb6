"""Cluster resolvers: of a cluster that the script describes, and of one for each source."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, final

from kerasdist.cluster import cloud_tpu, kerasdist_variables, sources
from kerasdist.cluster.source import Membership, Source, Variables
from kerasdist.cluster.spec import ClusterSpec
from kerasdist.core.earlier_names import refuse_arguments, resolve


class ClusterResolver(ABC):
    """Tells a process which workers its job has, and which of them it is.

    In the manner of ``tf.distribute.cluster_resolver.ClusterResolver``, for every backend. Without
    an argument a strategy for several workers calls `detect`; pass a resolver to override it.

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
        """``"chief"`` or ``"worker"``."""
        return self.membership().task_type

    @property
    def task_id(self) -> int:
        """The number of this task within its type."""
        return self.membership().task_id

    @property
    def rank(self) -> int:
        """The number of this worker in the job, from 0: the chief first, then the workers."""
        return self.membership().rank

    @property
    def num_workers(self) -> int:
        """How many workers there are, the chief among them."""
        return self.membership().num_workers

    @property
    def environment(self) -> str:
        """Always empty, as in TensorFlow outside of Google."""
        return ""

    @property
    def rpc_layer(self) -> str:
        """TensorFlow's protocol between workers; the other backends have their own."""
        return "grpc"

    def cluster_spec(self) -> ClusterSpec:
        """Returns the tasks and their addresses, None for an address that is not known."""
        place = self.membership()
        tasks = place.addresses or (None,) * place.num_workers
        # Rank 0 may be a chief beside the workers, or the first worker. Its own task tells which,
        # and so does any other's number, which does not count the chief.
        if place.task_type == "chief" or place.task_id != place.rank:
            return ClusterSpec({"chief": tasks[:1], "worker": tasks[1:]})
        return ClusterSpec({"worker": tasks})

    def master(
        self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None
    ) -> str:
        """Returns a task's address as TensorFlow writes it, or "" in a job of one.

        Args:
            task_type: The task's type; None: this process's.
            task_id: The task's number; None: this process's.
            rpc_layer: The protocol; None: `rpc_layer`; "" for none.

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

        Asking starts the backend.

        Args:
            task_type: None, or this process's type: a process knows its own machine alone.
            task_id: None, or this process's number.
            config_proto: Ignored; `tf.distribute`'s resolvers have it.

        Raises:
            ValueError: If another task is meant.
        """
        from kerasdist.backends import registry  # imported here, since it imports Keras

        place = self.membership()
        if (task_type or place.task_type, place.task_id if task_id is None else task_id) != (
            place.task_type,
            place.task_id,
        ):
            raise ValueError(
                f"Expected this process's own task, {place.task_type} {place.task_id}: the devices "
                f"of another cannot be asked for. Received: task_type={task_type!r}, "
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
        cluster_spec: The addresses by job: a `ClusterSpec`, or a mapping.
        task_type: This process's type.
        task_id: Its number within the type.
        coordinator: ``host:port`` on the machine of rank 0 for kerasdist itself. None: rank 0's own
            address, 1000 ports further up.
        environ: Where ``KERASDIST_COORDINATOR`` is looked for; None: ``os.environ``.
        **earlier: Arguments of ``tf.distribute``'s, which are refused.

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


class EnvironmentResolver(ClusterResolver):
    """The cluster that one source describes in environment variables.

    Args:
        environ: The variables; None for this process's own.
        **earlier: Arguments of ``tf.distribute``'s resolvers, which are refused.

    Raises:
        ClusterError: If they are missing or wrong.
        UnsupportedError: If the task is a parameter server or an evaluator.
    """

    _source: ClassVar[Source]

    def __init__(self, environ: Mapping[str, str] | None = None, **earlier: Any) -> None:
        refuse_arguments("a resolver", earlier)
        self._membership = self._source.membership(environ)

    def membership(self) -> Membership:
        """Returns this process's place in the job."""
        return self._membership


@final
class KerasdistClusterResolver(EnvironmentResolver):
    """The cluster that ``KERASDIST_WORKERS`` and ``KERASDIST_RANK`` describe."""

    _source = kerasdist_variables.SOURCE


@final
class TFConfigClusterResolver(EnvironmentResolver):
    """The cluster that ``TF_CONFIG`` describes.

    Source:
    https://www.tensorflow.org/api_docs/python/tf/distribute/cluster_resolver/TFConfigClusterResolver
    """

    _source = sources.TF_CONFIG


@final
class TorchrunClusterResolver(EnvironmentResolver):
    """The cluster that torchrun's variables describe."""

    _source = sources.TORCHRUN


@final
class KerasClusterResolver(EnvironmentResolver):
    """The cluster that ``KERAS_DISTRIBUTION_*`` describes."""

    _source = sources.KERAS


@final
class JAXClusterResolver(EnvironmentResolver):
    """The cluster that ``JAX_COORDINATOR_ADDRESS`` and its like describe."""

    _source = sources.JAX


@final
class SlurmClusterResolver(EnvironmentResolver):
    """The cluster that is a Slurm step of several tasks.

    Source:
    https://www.tensorflow.org/api_docs/python/tf/distribute/cluster_resolver/SlurmClusterResolver
    """

    _source = sources.SLURM


@final
class OpenMPIClusterResolver(EnvironmentResolver):
    """The cluster that Open MPI's ``mpirun`` has started."""

    _source = sources.OPEN_MPI


@final
class PMIClusterResolver(EnvironmentResolver):
    """The cluster that the ``mpirun`` of MPICH or one of its family has started."""

    _source = sources.PMI


@final
class CloudTPUClusterResolver(EnvironmentResolver):
    """The cluster that the hosts of a Cloud TPU make."""

    _source = cloud_tpu.SOURCE


@final
class SkyPilotClusterResolver(EnvironmentResolver):
    """The cluster that the nodes of a SkyPilot task make."""

    _source = sources.SKYPILOT


@final
class KubernetesClusterResolver(EnvironmentResolver):
    """The cluster that the pods of an indexed Kubernetes Job make."""

    _source = sources.KUBERNETES
