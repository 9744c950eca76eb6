"""TensorFlow's replica sets: one device with plain Keras, or several under ``tf.distribute``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, final

import keras
import tensorflow as tf

from kerasdist.api.options import CommunicationImplementation, CommunicationOptions
from kerasdist.api.replica_context import LocalBatch
from kerasdist.backends.base.checks import check_communication
from kerasdist.backends.base.interface import ReplicaOptions, ReplicaSet
from kerasdist.backends.base.kept_state import KeptState
from kerasdist.backends.base.runner import Runner
from kerasdist.backends.tensorflow.fit import gradients
from kerasdist.backends.tensorflow.fit.batches import HOST
from kerasdist.backends.tensorflow.fit.trainer import PlacedTrainer, TensorFlowTrainer
from kerasdist.backends.tensorflow.private.scopes import NativeScope, outside_strategies
from kerasdist.backends.tensorflow.private.strategies import (
    WorkersStrategy,
    central_storage_strategy,
    group_key,
    strategy_on_devices,
)
from kerasdist.backends.tensorflow.replica import outside_replicas
from kerasdist.backends.tensorflow.replica.all_reduce import AllReduce
from kerasdist.backends.tensorflow.replica.runner import TensorFlowRunner, in_replicas
from kerasdist.backends.tensorflow.workers.datasets import TensorFlowAdapter
from kerasdist.backends.tensorflow.workers.group import Group, WorkerGroup
from kerasdist.core.context import current
from kerasdist.core.devices import Device
from kerasdist.core.user_warnings import warn_user

if TYPE_CHECKING:
    from kerasdist.core.context import StrategyLike
    from kerasdist.job.job import Job


@final
class SoleDevice(ReplicaSet):
    """A replica set of one device, on which plain Keras runs."""

    # Keras's own graph reads the batches, so the host cannot measure how long training waits for
    # them.
    measures_data = False
    trainer_class = PlacedTrainer

    def is_tracing(self) -> bool:
        """Returns whether a graph is being traced."""
        return not tf.executing_eagerly()

    def data_adapter(self, adapter: Any) -> Any:
        """Returns an adapter that yields the same batches."""
        return TensorFlowAdapter(adapter)

    def placement(self) -> AbstractContextManager[Any]:
        """Returns a scope in which TensorFlow computes on this device."""
        return tf.device(_tensorflow_name(self.devices[0]))


@final
class TensorFlowReplicaSet(ReplicaSet):
    """Several devices, of one process or of many workers.

    Each device has a copy of every variable, or one parameter device has the only copy.

    Attributes:
        group: The replicas and their native strategy.
        count_batch: A function that adds an operation to a step's graph. Whenever the step runs,
            this operation counts a batch. None without a job.
    """

    trainer_class = TensorFlowTrainer
    count_batch: Callable[[], object] | None = None

    def __init__(
        self,
        devices: Sequence[Device],
        options: ReplicaOptions,
        group: Group,
        job: Job | None = None,
    ) -> None:
        count: Any = None
        if job is not None:
            with tf.init_scope(), outside_strategies(), tf.device(HOST):
                count = tf.Variable(tf.zeros([], tf.int64), trainable=False)
            self.count_batch = lambda: count.assign_add(1)
        begun = None if count is None else lambda: int(count.numpy())
        super().__init__(devices, options, job, begun)
        self.group = group
        outside_replicas.serve(group.native_strategy)
        gradients.install()

    def is_tracing(self) -> bool:
        """Returns whether a graph is being traced."""
        return not tf.executing_eagerly()

    @cached_property
    def runner(self) -> Runner:
        """The object that runs user functions on the devices."""
        return TensorFlowRunner(self, self.group)

    def data_adapter(self, adapter: Any) -> Any:
        """Returns an adapter that yields global batches, which Keras itself must not divide."""
        return TensorFlowAdapter(adapter, self.group)

    def placement(self) -> AbstractContextManager[Any]:
        """Returns a scope in which a Keras variable gets a copy on each of `variable_devices`."""
        return NativeScope(self.group.native_strategy)

    def equalize(self, variables: Sequence[keras.Variable]) -> None:
        """Gives variables the chief's values, eagerly, even while a function is being traced."""
        with tf.init_scope(), self.placement():
            self.group.equalize(variables)

    def run(
        self,
        strategy: StrategyLike,
        function: Callable[[Any], Any],
        batch: Any,
        *,
        kept: KeptState | None = None,
        updates_wait: bool = False,
    ) -> list[tuple[LocalBatch, Any]]:
        """Calls a function once per replica, in a graph or eagerly.

        With `kept`, each replica has its own copy of the state that the function keeps in Python
        objects. With `updates_wait`, the optimizer's update and assignments wait for `end_step`, or
        until their results are read. Returns, for each replica of this process, its local batch and
        the function's result.
        """
        local_rows = self.group.split(batch)

        def on_local_rows(index: int) -> tuple[LocalBatch, Any]:
            data = local_rows[index].rows
            local_batch = current.replica.local_batch  # type: ignore[union-attr]
            with _after(data):
                return local_batch, function(data)

        return in_replicas(
            strategy,
            self.group,
            on_local_rows,
            local_rows=local_rows,
            kept=kept,
            waits=updates_wait,
        )


def mirrored_replicas(devices: Sequence[Device], options: ReplicaOptions) -> TensorFlowReplicaSet:
    """Returns replicas on devices of this process."""
    names = [_tensorflow_name(device) for device in devices]
    home = options.parameter_device
    shares_memory = _share_memory(devices)
    if home is not None:
        native_strategy = central_storage_strategy(names, _tensorflow_name(home))
    else:
        native_strategy = strategy_on_devices(names, share_memory=shares_memory)
    # If devices share memory, or variables have a single copy, one device sums gradients.
    one_place = shares_memory or len(devices) == 1 or home is not None
    own = native_strategy.extended.worker_devices
    all_reduce = None if one_place else AllReduce(own, group_key())
    group = Group(native_strategy, all_reduce, shares_memory=shares_memory)
    return TensorFlowReplicaSet(devices, options, group)


def worker_replicas(
    devices: Sequence[Device], options: ReplicaOptions, job: Job
) -> TensorFlowReplicaSet:
    """Returns replicas on the devices of each worker."""
    _check_communication(options.communication, devices)
    seconds = options.communication.timeout_seconds or job.timeouts.meeting
    communication = replace(options.communication, timeout_seconds=seconds)
    native_strategy = WorkersStrategy(
        job.gather_addresses(),
        job.rank,
        [_tensorflow_name(device) for device in devices],
        communication,
    )
    group = WorkerGroup(native_strategy, job, communication, shares_memory=_share_memory(devices))
    replicas = TensorFlowReplicaSet(devices, options, group, job)
    native_strategy.replicas_are_known = lambda: replicas.is_in_call or not group.runs_loops
    return replicas


def _check_communication(options: CommunicationOptions, devices: Sequence[Device]) -> None:
    heeded = ("bytes_per_pack", "implementation", "timeout_seconds")
    check_communication(options, "TensorFlow", heeded)
    kinds = {device.kind for device in devices}
    if options.implementation is CommunicationImplementation.NCCL and kinds != {"gpu"}:
        warn_user(
            "Expected GPUs, for CommunicationImplementation.NCCL. Received: devices="
            f"{[str(device) for device in devices]}. Sums go by RING instead; use AUTO, which is "
            "NCCL where there are GPUs."
        )


def _share_memory(devices: Sequence[Device]) -> bool:
    return all(device.kind == "cpu" for device in devices)


@contextmanager
def _after(data: object) -> Iterator[None]:
    """Makes the operations inside of the block wait for the data.

    At the end of the data, a step fails when it asks for the next batch. Operations that do not use
    the batch, such as the increment of the optimizer's counter, must not run before the step fails.
    In plain Keras such operations do run: if the number of batches is unknown, the optimizer counts
    one step too many.
    """
    leaf = next(leaf for leaf in keras.tree.flatten(data) if leaf is not None)
    components = tf.nest.flatten(leaf, expand_composites=True)
    with tf.control_dependencies(components[:1]):
        arrived = tf.no_op()
    with tf.control_dependencies([arrived] if arrived is not None else []):
        yield


def _tensorflow_name(device: Device) -> str:
    return f"/device:{device.kind.upper()}:{device.index}"
