"""Private parts of TensorFlow that many workers need; a test watches each of them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

import tensorflow as tf
from tensorflow.core.protobuf import tensorflow_server_pb2
from tensorflow.python.distribute import collective_all_reduce_strategy as multi_worker
from tensorflow.python.distribute import distribute_lib, mirrored_strategy, values_util
from tensorflow.python.distribute import values as distributed_values
from tensorflow.python.eager import context as eager_context

# The name that TensorFlow has for what all workers do.
_JOB = "worker"

# Read by TensorFlow's server when it starts (grpc_server_lib.cc).
_REUSE_PORT = "TF_GRPC_REUSE_PORT"

# More than a strategy has groups of devices; TensorFlow's own tests use the same.
_KEYS_OF_A_STRATEGY = 100_000


def has_started() -> bool:
    """Returns whether TensorFlow's runtime has started, so that it cannot join others any more."""
    return _runtime()._context_handle is not None


def _runtime() -> Any:
    return eager_context.context()


def start_server(addresses: Sequence[str], rank: int) -> None:
    """Starts TensorFlow's runtime as one of several.

    `tf.distribute.MultiWorkerMirroredStrategy` does the same when it is made. It leaves all waits
    endless, and would start anew for a second strategy.

    Args:
        addresses: ``host:port`` of each worker.
        rank: This worker's number.
    """
    runtime = _runtime()
    leader = f"/job:{_JOB}/replica:0/task:0"
    runtime.configure_collective_ops(
        collective_leader=leader,
        scoped_allocator_enabled_ops=("CollectiveReduce",),
        device_filters=(_task(rank),),
    )
    # None: who is alive, the job watches. TensorFlow's own service would catch SIGTERM for good,
    # abort the process when a worker is late, and wait for lost workers at its end.
    runtime.configure_coordination_service(service_type="")
    runtime.enable_collective_ops(
        tensorflow_server_pb2.ServerDef(
            cluster=_cluster(addresses).as_cluster_def(),
            default_session_config=runtime.config,
            job_name=_JOB,
            task_index=rank,
            protocol="grpc",
        )
    )
    with _sharing_its_port():
        runtime.ensure_initialized()


@contextmanager
def _sharing_its_port() -> Iterator[None]:
    """Lets TensorFlow's server listen on a port that this process holds for it."""
    before = os.environ.get(_REUSE_PORT)
    os.environ[_REUSE_PORT] = "true"
    try:
        yield
    finally:
        del os.environ[_REUSE_PORT]
        if before is not None:
            os.environ[_REUSE_PORT] = before


def _task(rank: int) -> str:
    return f"/job:{_JOB}/task:{rank}"


def _cluster(addresses: Sequence[str]) -> tf.train.ClusterSpec:
    return tf.train.ClusterSpec({_JOB: list(addresses)})


@final
class SharedSum(distributed_values.SyncOnReadVariable):
    """A variable that replicas write for themselves, and that is read as their sum or mean.

    TensorFlow reads it by a collective, so all workers must read it at the same time: a callback of
    the chief's that looks at a metric would wait for ever, and so would a chief that saves the
    moving statistics of a layer. Where the value is known it is handed out without.
    """

    # The class of the object is changed after it is made, so that there is no `__init__`.
    # What all replicas hold together, if it is known.
    _known: tf.Tensor | None = None
    # Whether all replicas hold the same, as long as no custom loop has run.
    _is_equal = False

    @property
    def known(self) -> tf.Tensor | None:
        """What all replicas hold together, None if it is not known."""
        return self._known

    def know(self, whole: tf.Tensor | None) -> None:
        """Notes what all replicas hold together.

        Args:
            whole: Their sum or mean; None if it is not known any more.
        """
        self._known = whole

    def know_first(self) -> None:
        """Notes that all replicas hold what the first one here does."""
        first = self._values[0].read_value()
        is_sum = self.aggregation == tf.VariableAggregation.SUM
        replicas = self._distribute_strategy.num_replicas_in_sync
        self.know(first * tf.cast(replicas, first.dtype) if is_sum else first)

    def know_equal(self) -> None:
        """Notes that in steps of `fit` all replicas write the same."""
        self._is_equal = True

    @property
    def is_whole_here(self) -> bool:
        """Whether all replicas hold the same, or only the first one's counts."""
        return self._is_equal or self.aggregation == tf.VariableAggregation.ONLY_FIRST_REPLICA

    def assign(
        self, value: Any, use_locking: bool = False, name: Any = None, read_value: bool = True
    ) -> Any:
        """Assigns; TensorFlow's own would read the variable too, by a collective."""
        if not _in_cross_replica_code():
            return super().assign(value, use_locking, name, read_value)
        super().assign(value, use_locking, name, read_value=False)
        self.know(tf.convert_to_tensor(value, self.dtype) if tf.executing_eagerly() else None)
        return self

    def _get_cross_replica(self) -> Any:
        first_counts = self.aggregation == tf.VariableAggregation.ONLY_FIRST_REPLICA
        if not first_counts and self._distribute_strategy.extended.replicas_are_known:
            if self._is_equal:
                return self._values[0].read_value()
            if self._known is not None and tf.executing_eagerly():
                return self._known
        return super()._get_cross_replica()


def _in_cross_replica_code() -> bool:
    return distribute_lib.in_cross_replica_context() and not values_util.in_replica_update_context()


@final
class WorkersStrategy(tf.distribute.MultiWorkerMirroredStrategy):
    """``tf.distribute.MultiWorkerMirroredStrategy`` on devices of choice."""

    def __init__(
        self,
        addresses: Sequence[str],
        rank: int,
        devices: Sequence[str],
        options: tf.distribute.experimental.CommunicationOptions,
    ) -> None:
        """Makes the strategy; the runtime's server has started.

        Args:
            addresses: ``host:port`` of each worker.
            rank: This worker's number.
            devices: The names of this worker's devices.
            options: How to communicate.
        """
        WorkersStrategy._collective_key_base += _KEYS_OF_A_STRATEGY
        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
            _cluster(addresses), task_type=_JOB, task_id=rank, rpc_layer="grpc"
        )
        tf.distribute.Strategy.__init__(self, _Extended(self, resolver, options, devices))
        self.num_workers = len(addresses)
        # TensorFlow counts its groups from the strategy's base on.
        self.group_key = WorkersStrategy._collective_key_base + _KEYS_OF_A_STRATEGY - 1


@final
class _Extended(multi_worker.CollectiveAllReduceExtended):
    _enable_check_health = False
    _std_server_started = True

    def __init__(self, strategy: Any, resolver: Any, options: Any, devices: Sequence[str]) -> None:
        self._chosen = devices
        # Whether a custom loop has run, and how many calls of fit and its like are under way.
        self.runs_loops = False
        self.calls = 0
        super().__init__(strategy, resolver, options)

    @property
    def replicas_are_known(self) -> bool:
        """Whether nothing but steps of `fit` and its like can have written to variables."""
        return self.calls > 0 or not self.runs_loops

    def _initialize_local_devices(self, cluster_resolver: Any, worker_device: str) -> Any:
        # TensorFlow's own knows one CPU device, or all GPUs.
        del cluster_resolver
        kind = tf.DeviceSpec.from_string(self._chosen[0]).device_type
        return tuple(worker_device + device for device in self._chosen), kind

    def _get_variable_creator_initial_value(
        self, replica_id: int, device: Any, primary_var: Any, **kwargs: Any
    ) -> Any:
        # TensorFlow sends the chief's value for each variable by itself, and waits for ever if
        # workers make other variables. Here they are compared first, then sent together.
        return mirrored_strategy.MirroredExtended._get_variable_creator_initial_value(
            self, replica_id, device, primary_var, **kwargs
        )

    def _create_variable(self, next_creator: Any, **kwargs: Any) -> Any:
        variable = super()._create_variable(next_creator, **kwargs)
        if type(variable) is distributed_values.SyncOnReadVariable:
            variable.__class__ = SharedSum
            if tf.executing_eagerly():
                variable.know_first()
        return variable


def private_names() -> tuple[object, ...]:
    """Returns what this file needs of TensorFlow, for the test that watches it."""
    return (
        distribute_lib.in_cross_replica_context,
        values_util.in_replica_update_context,
        eager_context.Context.configure_collective_ops,
        eager_context.Context.configure_coordination_service,
        eager_context.Context.enable_collective_ops,
        distributed_values.SyncOnReadVariable._get_cross_replica,
        distributed_values.SyncOnReadVariable.assign,
        mirrored_strategy.MirroredExtended._get_variable_creator_initial_value,
        mirrored_strategy.MirroredExtended._create_variable,
        multi_worker.CollectiveAllReduceExtended._initialize_local_devices,
        multi_worker.CollectiveAllReduceExtended._enable_check_health,
    )
