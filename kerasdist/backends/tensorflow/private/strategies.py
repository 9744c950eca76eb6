"""The native strategies of ``tf.distribute``, for one process and for many workers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast, final
from weakref import WeakSet

import tensorflow as tf

from kerasdist.api.options import CommunicationImplementation, CommunicationOptions
from kerasdist.backends.tensorflow import internals
from kerasdist.core.context import replaced_entries
from kerasdist.core.internals import require_all, with_base
from kerasdist.training.binding import bind

# The strategies that kerasdist made. Its patches leave a user's own strategies unchanged.
ours: WeakSet[tf.distribute.Strategy] = WeakSet()

# The base of the classes below that call methods of a private class of TensorFlow by ``super()``.
# `bind` and `with_base` later make a subclass of such a class and of TensorFlow's class.
_Native: Any = object

# How many collective keys are reserved for a strategy, which needs one key per group of devices.
KEYS_OF_A_STRATEGY = 100_000

# The name of the workers' job in TensorFlow's description of the cluster.
_JOB = "worker"

# TensorFlow's server reads this environment variable when it starts (grpc_server_lib.cc).
_REUSE_PORT = "TF_GRPC_REUSE_PORT"


def strategy_on_devices(
    devices: list[str], *, share_memory: bool
) -> tf.distribute.MirroredStrategy:
    """Returns a ``MirroredStrategy`` that can be used with other strategies in one process."""
    _reserve_keys(tf.distribute.MirroredStrategy)
    reduction = tf.distribute.ReductionToOneDevice() if share_memory else None
    return tf.distribute.MirroredStrategy(devices, cross_device_ops=reduction)


# For each native class, how many strategies have reserved keys so far.
_reserved: dict[type, int] = {}


def _reserve_keys(native_class: type) -> None:
    """Reserves collective keys for the next strategy of a class.

    TensorFlow itself would give the devices of every strategy the same key. Then a collective of a
    second strategy with other devices fails: "Device CPU:0 is joining a group with size 3, but that
    group has size 2".
    """
    base, number = internals.COLLECTIVE_KEY_BASE, _reserved.get(native_class, 0) + 1
    if number > 1 or base.is_there():
        base.set(native_class, base.of(native_class) + KEYS_OF_A_STRATEGY)
    _reserved[native_class] = number


def group_key(native_class: type = tf.distribute.MirroredStrategy) -> int:
    """Returns the group key of kerasdist's own collectives, for the newest strategy of a class.

    The key is the last one of the range that is reserved for the strategy. TensorFlow itself uses
    the keys from the beginning of this range, so the two never use the same key.
    """
    return (_reserved[native_class] + 1) * KEYS_OF_A_STRATEGY - 1


def central_storage_strategy(devices: list[str], home: str) -> Any:
    """Returns a ``tf.distribute`` strategy that keeps variables on one device."""
    _reserve_keys(tf.distribute.MirroredStrategy)
    return tf.distribute.experimental.CentralStorageStrategy(devices, home)


def keeps_one_copy(native_strategy: tf.distribute.Strategy) -> bool:
    """Returns whether all replicas share one copy of each variable."""
    return isinstance(native_strategy, tf.distribute.experimental.CentralStorageStrategy)


def mirrored(parts: Sequence[Any]) -> Any:
    """Returns a ``tf.distribute`` value whose components are equal."""
    return internals.MIRRORED.value(parts)


def is_distributed(variable: object) -> bool:
    """Returns whether a TensorFlow variable was made under a strategy of ``tf.distribute``."""
    return isinstance(variable, tf.Variable) and hasattr(variable, "distribute_strategy")


def components(held: Any) -> Sequence[Any]:
    """Returns the components that this process has of a distributed value or variable.

    Any other value is returned in a tuple of one.
    """
    return held.values if isinstance(held, tf.distribute.DistributedValues) else (held,)


@contextmanager
def keeping_input_devices(native_strategy: tf.distribute.Strategy) -> Iterator[None]:
    """Restores the devices of a strategy's input pipelines when the block ends.

    A dataset with one pipeline per replica changes these devices permanently. Then every later
    dataset of the strategy would also get one pipeline per replica, and all replicas would get the
    same batches (seen with TensorFlow 2.21). A central storage strategy does not store the devices.
    """
    if keeps_one_copy(native_strategy):
        yield
        return
    devices = internals.INPUT_DEVICES.of(native_strategy.extended)
    try:
        yield
    finally:
        internals.INPUT_DEVICES.set(native_strategy.extended, devices)


def plain_copy(variable: Any, value: tf.Tensor) -> tf.Variable:
    """Returns a plain ``tf.Variable`` with the given value, as a copy of another variable.

    Keras's optimizers take the copy for the variable itself.
    """
    copy = tf.Variable(value, trainable=variable.trainable, name="copy", shape=value.shape)
    # By this id an optimizer finds its own state for the variable, such as the momentum.
    internals.UNIQUE_ID.set(copy, internals.UNIQUE_ID.of(variable))
    return copy


def replicated_copy(variable: Any) -> Any:
    """Returns a copy of a strategy's variable, made of copies of the variable's components."""
    parts = components(variable)
    with variable.distribute_strategy.scope():
        copy: Any = tf.Variable(
            parts[0].read_value(),
            trainable=variable.trainable,
            synchronization=variable.synchronization,
            aggregation=variable.aggregation,
            name="copy",
        )
        for own, part in zip(components(copy), parts, strict=True):
            own.assign(part.read_value())
    internals.UNIQUE_ID.set(components(copy)[0], internals.UNIQUE_ID.of(variable))
    if isinstance(copy, SharedSum):
        copy.known, copy.is_equal = variable.known, variable.is_equal
    return copy


def has_started() -> bool:
    """Returns whether TensorFlow's runtime has started, so that it cannot join other workers."""
    threads = tf.config.threading.get_inter_op_parallelism_threads()
    try:
        tf.config.threading.set_inter_op_parallelism_threads(threads + 1)
    except RuntimeError:  # TensorFlow cannot change the threads of a runtime that has started
        return True
    tf.config.threading.set_inter_op_parallelism_threads(threads)
    return False


def start_server(addresses: Sequence[str], rank: int) -> None:
    """Starts TensorFlow's runtime as one server of the job's cluster.

    `tf.distribute.MultiWorkerMirroredStrategy` does nearly the same when it is made. But it would
    also start TensorFlow's coordination service, and start the runtime again for a second strategy.
    """
    runtime: Any = internals.EAGER_CONTEXT.value()
    internals.CONFIGURE_COLLECTIVES.of(runtime)(
        collective_leader=f"/job:{_JOB}/replica:0/task:0",
        scoped_allocator_enabled_ops=("CollectiveReduce",),
        device_filters=(f"/job:{_JOB}/task:{rank}",),
    )
    # TensorFlow's coordination service is not used, because kerasdist's job detects lost workers.
    # TensorFlow's service would catch SIGTERM permanently and abort if a worker is late.
    # At exit, TensorFlow's service would also wait for lost workers.
    internals.CONFIGURE_COORDINATION.of(runtime)(service_type="")
    internals.ENABLE_COLLECTIVES.of(runtime)(
        tf.train.ServerDef(
            cluster=_cluster(addresses).as_cluster_def(),
            default_session_config=internals.RUNTIME_CONFIG.of(runtime),
            job_name=_JOB,
            task_index=rank,
            protocol="grpc",
        )
    )
    # This environment variable lets the server listen on a port that is reserved for this process.
    with replaced_entries(os.environ, {_REUSE_PORT: "true"}):
        internals.START_RUNTIME.of(runtime)()


def _cluster(addresses: Sequence[str]) -> tf.train.ClusterSpec:
    return tf.train.ClusterSpec({_JOB: list(addresses)})


class SharedSum(_Native):
    """A sync-on-read variable that caches its aggregated value.

    TensorFlow reads such a variable by a collective, so all workers must read it at the same time.
    A callback that reads a metric only on the chief would wait forever, and so would a chief that
    saves a layer's moving statistics. If the value is cached, reading needs no collective.

    Attributes:
        known: The cached value, aggregated over all replicas; None if it is not known.
        is_equal: Whether all replicas assign equal values in `fit`, so that their components are
            equal as long as no custom loop has run.
    """

    # There is no `__init__`: TensorFlow makes the object, and `bind` then changes its class.

    known: tf.Tensor | None = None
    is_equal = False

    def remember_first(self) -> None:
        """Caches the aggregated value. All replicas must have equal components at this time."""
        first = self.values[0].read_value()
        is_sum = self.aggregation == tf.VariableAggregation.SUM
        replicas = self.distribute_strategy.num_replicas_in_sync
        self.known = first * tf.cast(replicas, first.dtype) if is_sum else first

    @property
    def is_whole_here(self) -> bool:
        """Whether a read needs no sum: the components are equal, or only the first one counts."""
        return self.is_equal or self.aggregation == tf.VariableAggregation.ONLY_FIRST_REPLICA

    def assign(
        self, value: Any, use_locking: bool = False, name: Any = None, read_value: bool = True
    ) -> Any:
        """Assigns a value. In cross-replica code, caches the value and does not read the variable.

        TensorFlow's own method would return the new value, which it would read by a collective.
        """
        if not _in_cross_replica_code():
            return super().assign(value, use_locking, name, read_value)
        super().assign(value, use_locking, name, read_value=False)
        remember_sum(self, tf.convert_to_tensor(value, self.dtype))
        return self

    def assign_add(self, *args: object, **kwargs: object) -> object:
        """Does the same as TensorFlow's own method, and clears the cache."""
        self.known = None
        return super().assign_add(*args, **kwargs)

    def assign_sub(self, *args: object, **kwargs: object) -> object:
        """Does the same as TensorFlow's own method, and clears the cache."""
        self.known = None
        return super().assign_sub(*args, **kwargs)

    def _get_cross_replica(self) -> Any:
        first_counts = self.aggregation == tf.VariableAggregation.ONLY_FIRST_REPLICA
        if not first_counts and self.distribute_strategy.replicas_are_known():
            if self.is_equal:
                return self.values[0].read_value()
            if self.known is not None and tf.executing_eagerly():
                return self.known
        return super()._get_cross_replica()


def remember_sum(variable: object, total: tf.Tensor) -> None:
    """Caches the sum of a `SharedSum`'s components; in a graph, clears the cache instead."""
    if isinstance(variable, SharedSum):
        variable.known = total if tf.executing_eagerly() else None


def _in_cross_replica_code() -> bool:
    # Outside of every scope, variables enter their strategy's cross-replica context by themselves.
    is_outside = tf.distribute.in_cross_replica_context() or not tf.distribute.has_strategy()
    return is_outside and not internals.IN_UPDATE.value()


@final
class WorkersStrategy(tf.distribute.MultiWorkerMirroredStrategy):
    """``tf.distribute.MultiWorkerMirroredStrategy`` on given devices.

    Attributes:
        replicas_are_known: A function that returns whether variables were written only in steps of
            `fit`, `evaluate` and `predict`, so that cached values are valid.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        rank: int,
        devices: Sequence[str],
        options: CommunicationOptions,
    ) -> None:
        """Makes the strategy; `start_server` must have been called before."""
        require_all(internals, internals.JOB)
        _reserve_keys(WorkersStrategy)
        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
            _cluster(addresses), task_type=_JOB, task_id=rank, rpc_layer="grpc"
        )
        extended_class = with_base(cast("type", _Extended), internals.WORKERS_EXTENDED.value)
        extended = extended_class(self, resolver, _native(options), devices)
        tf.distribute.Strategy.__init__(self, extended)
        self.replicas_are_known: Callable[[], bool] = lambda: True
        self.group_key = group_key(WorkersStrategy)


class _Extended(_Native):
    """The methods of ``strategy.extended`` in which `WorkersStrategy` differs from TensorFlow's."""

    _enable_check_health = False
    _std_server_started = True

    def __init__(self, strategy: Any, resolver: Any, options: Any, devices: Sequence[str]) -> None:
        self._chosen = devices
        super().__init__(strategy, resolver, options)

    def _initialize_local_devices(self, cluster_resolver: Any, worker_device: str) -> Any:
        # TensorFlow's own method would choose one CPU device, or all GPUs.
        kind = tf.DeviceSpec.from_string(self._chosen[0]).device_type
        return tuple(worker_device + device for device in self._chosen), kind

    def _get_variable_creator_initial_value(
        self, replica_id: int, device: Any, primary_var: Any, **kwargs: object
    ) -> Any:
        # TensorFlow would broadcast the chief's value of each variable separately, and wait forever
        # if workers make different variables. `InitialBroadcast` first compares the variables, and
        # then broadcasts all values together.
        return internals.INITIAL_VALUE.value(self, replica_id, device, primary_var, **kwargs)

    def _create_variable(self, next_creator: Any, **kwargs: object) -> Any:
        variable = super()._create_variable(next_creator, **kwargs)
        if type(variable) is internals.SYNC_ON_READ_VARIABLE.value:
            bind(variable, SharedSum)
            if tf.executing_eagerly():
                variable.remember_first()
        return variable


def _native(options: CommunicationOptions) -> Any:
    implementation = CommunicationImplementation(options.implementation)
    return tf.distribute.experimental.CommunicationOptions(
        bytes_per_pack=options.bytes_per_pack,
        timeout_seconds=options.timeout_seconds,
        implementation=tf.distribute.experimental.CommunicationImplementation[implementation.name],
    )
