"""Replicas of several devices each: TPUs, and on JAX devices of any kind; `kerasdist.tpu`.

To users `kerasdist.tpu` is this module: the way to a strategy as ``tf.distribute`` has it.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

import numpy as np

from kerasdist.api.strategy import Strategy
from kerasdist.backends import registry
from kerasdist.backends.base.interface import Backend, ReplicaOptions, ReplicaSet
from kerasdist.cluster.detection import detect
from kerasdist.cluster.resolver import ClusterResolver
from kerasdist.cluster.source import Membership
from kerasdist.core.earlier_names import refuse_arguments, resolve
from kerasdist.core.partitions import DeviceAssignment, DeviceOrderMode, Topology
from kerasdist.errors import DeviceError, UnsupportedError
from kerasdist.strategies.arguments import ShardingOption, checked_resolver, replica_options
from kerasdist.strategies.choice import chosen_devices
from kerasdist.strategies.multi_worker import replicas_of_job
from kerasdist.training import hooks

__all__ = ["DeviceAssignment", "DeviceOrderMode", "Topology", "initialize_tpu_system"]


@final
class TPUStrategy(Strategy):
    """Synchronous training on TPUs, with a model on one device or cut over several.

    On JAX the devices are this machine's TPUs, else its GPUs, else its CPU devices. In a job of
    several workers, such as the hosts of a TPU pod, they are those of all workers: each runs the
    same script, and making the strategy joins the job, as in `MultiWorkerMirroredStrategy`.

    With one worker a replica may have several devices, its logical devices: `split_variables` says
    which variables are cut over them, so that a model trains that does not fit one device, and
    `fit` still gives the numbers of one. On TensorFlow and PyTorch the strategy is refused.

    Example::

        strategy = kd.TPUStrategy()  # a replica on each chip
        with strategy.scope():
            model = build_model()
            model.compile(optimizer="adam", loss="mse")

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/TPUStrategy
    """

    def __init__(
        self,
        tpu_cluster_resolver: Any = None,
        experimental_device_assignment: DeviceAssignment | None = None,
        experimental_spmd_xla_partitioning: bool = False,
        *,
        sharding: ShardingOption = None,
        **earlier: Any,
    ) -> None:
        """Makes the strategy.

        Args:
            tpu_cluster_resolver: Who takes part, a `kerasdist.cluster.ClusterResolver`. Otherwise
                `kerasdist.cluster.detect` finds it out, on a TPU VM from its metadata.
            experimental_device_assignment: How many replicas there are, and which devices each
                has. None: one replica on each device.
            experimental_spmd_xla_partitioning: Whether XLA divides the program; on JAX it always
                does.
            sharding: As in `kerasdist.MirroredStrategy`; with replicas of one device each.
            **earlier: `device_assignment`, which was the name in ``tf.distribute`` 1.

        Raises:
            ClusterError: If the environment contradicts itself.
            JobError: If the workers of a job do not come together.
            DeviceError: If there are not enough devices, or not as many as workers have.
            UnsupportedError: On TensorFlow and PyTorch; for replicas of several devices in a job of
                several workers, or with `sharding`.
            ValueError: If `sharding` is none of its values.
        """
        self._resolver = _resolver(tpu_cluster_resolver)
        place = None if self._resolver is None else self._resolver.membership()
        backend = registry.current()
        if backend.tpu_refusal is not None:
            raise UnsupportedError(backend.tpu_refusal)
        options = replica_options(sharding)
        assignment = experimental_device_assignment or earlier.pop("device_assignment", None)
        refuse_arguments("TPUStrategy", earlier)
        super().__init__(_replicas(backend, place, assignment, options))
        hooks.install()

    def experimental_split_to_logical_devices(
        self, tensor: Any, partition_dimensions: Sequence[int]
    ) -> Any:
        """Cuts a tensor over the logical devices of a replica.

        Args:
            tensor: A tensor of the model's or the step's computation.
            partition_dimensions: Number of shards along each axis.

        Returns:
            The tensor, of the same shape and values.

        Raises:
            ValueError: If there is not one number an axis; if they do not multiply to the number of
                logical devices; if an axis cannot be cut evenly.
        """
        return self._devices_of_replica.split(tensor, partition_dimensions)

    def experimental_assign_to_logical_device(self, tensor: Any, logical_device_id: int) -> Any:
        """Gives the computation of a tensor to one logical device of each replica.

        On JAX a program is the same on all devices of a replica, so that the tensor is computed,
        whole, on each of them, that one included.

        Args:
            tensor: A tensor of the model's or the step's computation.
            logical_device_id: The device's number, from 0.

        Returns:
            The tensor, of the same shape and values.

        Raises:
            ValueError: If a replica has no such device.
        """
        return self._devices_of_replica.assign(tensor, logical_device_id)

    def experimental_replicate_to_logical_devices(self, tensor: Any) -> Any:
        """Keeps a tensor whole on each logical device of a replica.

        Args:
            tensor: A tensor of the model's or the step's computation.

        Returns:
            The tensor, of the same shape and values.
        """
        return self._devices_of_replica.replicate(tensor)

    def split_variables(self, rules: Mapping[str, Sequence[int]]) -> None:
        """Cuts variables over the logical devices of each replica, so that none holds them whole.

        Optimizer variables that belong to a variable are cut as it is.

        Example::

            strategy.split_variables({r"dense.*/kernel": (1, 2)})  # two halves of the columns

        Args:
            rules: For each pattern, searched for in a variable's path, the number of shards along
                each axis; the first that fits counts. They add to those given before, and hold
                from the next call of `fit`, `evaluate` or `predict` on.

        Raises:
            ValueError: If a pattern is no regular expression, or the shards do not multiply to the
                number of logical devices. Where a rule does not fit a variable's shape, the call
                that uses the variable raises it.
        """
        self._devices_of_replica.split_variables(rules)

    @property
    def _devices_of_replica(self) -> Any:
        assert self.replica_set is not None
        return self.replica_set.logical_devices


def _resolver(given: object) -> ClusterResolver | None:
    if isinstance(given, ClusterResolver):
        return given
    try:
        return detect()
    except UnsupportedError:  # an evaluator, which works by itself
        return None


def _replicas(
    backend: Backend,
    place: Membership | None,
    assignment: DeviceAssignment | None,
    options: ReplicaOptions,
) -> ReplicaSet:
    if options.sharding is not None and assignment is not None:
        raise UnsupportedError(
            "Expected one of sharding and experimental_device_assignment. Received: "
            f"sharding={options.sharding!r:.200}, experimental_device_assignment={assignment}. "
            "Leave one of them out: a keras.distribution.LayoutMap, passed as sharding, gives a "
            "replica several devices."
        )
    if place is not None and place.num_workers > 1:
        return _of_all_workers(backend, place, assignment, options)
    devices = chosen_devices(backend, None)
    if options.devices_per_replica > 1:  # those of a LayoutMap's mesh
        return backend.replica_set(devices, options)
    assignment = assignment or DeviceAssignment.build(len(devices))
    per_replica = assignment.num_cores_per_replica
    chosen = [
        assignment.tpu_ordinal(replica, core)
        for replica in range(assignment.num_replicas)
        for core in range(per_replica)
    ]
    needed = max(chosen) + 1
    if needed > len(devices):
        raise DeviceError(
            f"Expected {needed} devices for {assignment.num_replicas} replicas of {per_replica} "
            f"each. Received: devices={[str(device) for device in devices]}. To try it without "
            f"accelerators, call kerasdist.config.set_logical_cpu_devices({needed}) before JAX "
            "starts."
        )
    options = dataclasses.replace(options, devices_per_replica=per_replica)
    return backend.replica_set([devices[number] for number in chosen], options)


def _of_all_workers(
    backend: Backend,
    place: Membership,
    assignment: DeviceAssignment | None,
    options: ReplicaOptions,
) -> ReplicaSet:
    who = f"[worker {place.rank}/{place.num_workers}]"
    if assignment is not None and assignment.num_cores_per_replica > 1:
        raise UnsupportedError(
            f"{who} Expected one device a replica where a job has several workers. Received: "
            f"experimental_device_assignment={assignment}. Train on one host with it, or leave "
            "it out."
        )
    replicas = replicas_of_job(backend, place, None, options)
    if assignment is not None and assignment.num_replicas != replicas.num_replicas:
        raise DeviceError(
            f"{who} Expected a replica on each of the {replicas.num_replicas} devices of this "
            f"job's workers. Received: experimental_device_assignment={assignment}. Leave it out."
        )
    return replicas


def connect_to_cluster(
    cluster_spec_or_resolver: ClusterResolver | None = None, **given: Any
) -> None:
    """Takes the cluster that a strategy is to connect with, which it does as it is made.

    Example::

        resolver = kd.cluster_resolver.TPUClusterResolver()
        kd.connect_to_cluster(resolver)
        strategy = kd.TPUStrategy(resolver)

    Source: https://www.tensorflow.org/api_docs/python/tf/config/experimental_connect_to_cluster

    Args:
        cluster_spec_or_resolver: A resolver, which is then passed to the strategy.
        **given: Arguments of ``tf.distribute``'s that mean nothing here.

    Raises:
        TypeError: If it is no resolver.
        UnsupportedError: If another argument is given.
    """
    refuse_arguments("connect_to_cluster", given)
    checked_resolver(cluster_spec_or_resolver)


def initialize_tpu_system(cluster_resolver: ClusterResolver | None = None) -> Topology:
    """Returns where this job's TPUs are; in a job of several workers, all of them must call it.

    Devices that are no TPUs stand in for a slice: as square a grid as can be, row by row.

    Example::

        topology = kd.tpu.initialize_tpu_system(kd.cluster_resolver.TPUClusterResolver())
        print(topology.mesh_shape, topology.num_tasks, topology.num_tpus_per_task)

    Source: https://www.tensorflow.org/api_docs/python/tf/tpu/experimental/initialize_tpu_system

    Args:
        cluster_resolver: Who takes part; None: as for `kerasdist.TPUStrategy`.

    Raises:
        UnsupportedError: On TensorFlow and PyTorch.
    """
    backend = registry.current()
    if backend.tpu_refusal is not None:
        raise UnsupportedError(backend.tpu_refusal)
    resolver = _resolver(cluster_resolver)
    place = None if resolver is None else resolver.membership()
    if place is not None and place.num_workers > 1:
        devices = replicas_of_job(backend, place, None, replica_options()).devices
        workers = place.num_workers
    else:
        devices, workers = chosen_devices(backend, None), 1
    places = backend.coordinates(devices[0].kind)
    if places is None:
        return Topology.grid(workers, len(devices))
    return Topology(None, np.max(places, axis=(0, 1)) + 1, places)


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Returns the module itself for ``experimental``, in which TensorFlow has these names."""
        module = sys.modules[__name__]
        return module if name == "experimental" else resolve("kerasdist.tpu", module, name)
