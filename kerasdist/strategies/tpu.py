"""`TPUStrategy`, and the functions of ``tf.tpu.experimental``.

Under a `TPUStrategy` a replica may have several devices. Users see this module as `kerasdist.tpu`.
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
from kerasdist.cluster.resolver import ClusterResolver
from kerasdist.cluster.source import Membership
from kerasdist.core.earlier_names import refuse_arguments, resolve
from kerasdist.core.partitions import DeviceAssignment, DeviceOrderMode, Topology
from kerasdist.errors import DeviceError, UnsupportedError
from kerasdist.strategies.arguments import ShardingOption, checked_resolver, replica_options
from kerasdist.strategies.choice import chosen_devices, detect_workers
from kerasdist.strategies.multi_worker import replicas_of_job
from kerasdist.training import hooks

__all__ = ["DeviceAssignment", "DeviceOrderMode", "Topology", "initialize_tpu_system"]


@final
class TPUStrategy(Strategy):
    """Synchronous training on TPUs, with each replica on one device or split across several.

    On JAX the devices are this machine's TPUs. If the machine has no TPUs, the devices are its
    GPUs, and if it has no GPUs either, its CPU devices. In a job of several workers, such as the
    hosts of a TPU pod, the strategy has the devices of all workers: each worker runs the same
    script and joins the job when it makes the strategy, as with `MultiWorkerMirroredStrategy`.

    With one worker a replica may have several devices, called its logical devices.
    `split_variables` says which variables are cut over these devices, so that a model that does not
    fit one device can train; `fit` still returns the same as on one device. TensorFlow and PyTorch
    do not support this strategy.

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
            tpu_cluster_resolver: A `kerasdist.cluster.ClusterResolver` that describes the workers.
                None: `kerasdist.cluster.detect` finds the workers, on a TPU VM by its metadata.
            experimental_device_assignment: How many replicas there are, and which devices each of
                them has. None means one replica on each device.
            experimental_spmd_xla_partitioning: Has no effect, because on JAX, XLA always divides
                the program among the devices.
            sharding: The same as in `kerasdist.MirroredStrategy`; not together with
                `experimental_device_assignment`.
            **earlier: `device_assignment`, the name of `experimental_device_assignment` in
                ``tf.distribute`` 1.

        Raises:
            ClusterError: If environment variables contradict each other about the cluster.
            JobError: If the workers of a job do not find each other.
            DeviceError: If there are not enough devices, or the workers have different numbers of
                them.
            UnsupportedError: On TensorFlow and PyTorch. Also if `experimental_device_assignment` is
                passed together with `sharding`, or gives a replica several devices in a job of
                several workers.
            ValueError: If `sharding` has none of its allowed values.
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
        """Cuts a tensor into shards, one for each logical device of a replica.

        Args:
            tensor: A tensor that the model or the step computes.
            partition_dimensions: Number of shards along each axis.

        Returns:
            The tensor, with the same shape and values.

        Raises:
            ValueError: If `partition_dimensions` does not have one number per axis, if the product
                of its numbers is not the number of logical devices, or if an axis cannot be cut
                evenly.
        """
        return self._devices_of_replica.split(tensor, partition_dimensions)

    def experimental_assign_to_logical_device(self, tensor: Any, logical_device_id: int) -> Any:
        """Makes sure that one logical device of each replica computes a tensor.

        On JAX all devices of a replica run the same program. So all of them compute the whole
        tensor, not only the device that `logical_device_id` names.

        Args:
            tensor: A tensor that the model or the step computes.
            logical_device_id: The number of the device, from 0.

        Returns:
            The tensor, with the same shape and values.

        Raises:
            ValueError: If a replica has no device of this number.
        """
        return self._devices_of_replica.assign(tensor, logical_device_id)

    def experimental_replicate_to_logical_devices(self, tensor: Any) -> Any:
        """Keeps a copy of a tensor on each logical device of a replica.

        Args:
            tensor: A tensor that the model or the step computes.

        Returns:
            The tensor, with the same shape and values.
        """
        return self._devices_of_replica.replicate(tensor)

    def split_variables(self, rules: Mapping[str, Sequence[int]]) -> None:
        """Cuts variables into shards, of which each logical device of a replica holds one.

        An optimizer's variables are cut in the same way as the variable to which they belong.

        Example::

            strategy.split_variables({r"dense.*/kernel": (1, 2)})  # two halves of the columns

        Args:
            rules: Maps each pattern, a regular expression, to a number of shards along each axis.
                The first pattern that is found in a variable's path applies to the variable. The
                rules are added to earlier rules, and apply from the next call of `fit`, `evaluate`
                or `predict`.

        Raises:
            ValueError: If a pattern is not a regular expression, or the product of a rule's numbers
                is not the number of logical devices. If a rule does not fit a variable's shape, the
                later call that uses the variable, such as `fit`, raises this error.
        """
        self._devices_of_replica.splits.add(rules)

    @property
    def _devices_of_replica(self) -> Any:
        assert self.replica_set is not None
        return self.replica_set.logical_devices


def _resolver(given: object) -> ClusterResolver | None:
    return given if isinstance(given, ClusterResolver) else detect_workers()


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
    # If `sharding` is a LayoutMap, its mesh says how many devices a replica has.
    if options.devices_per_replica > 1:
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
            f"{who} Expected one device per replica in a job of several workers. Received: "
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
    """Only checks a resolver: the process connects to the cluster when it makes a strategy.

    Example::

        resolver = kd.cluster_resolver.TPUClusterResolver()
        kd.connect_to_cluster(resolver)
        strategy = kd.TPUStrategy(resolver)

    Source: https://www.tensorflow.org/api_docs/python/tf/config/experimental_connect_to_cluster

    Args:
        cluster_spec_or_resolver: A resolver, which you must also pass to the strategy.
        **given: Arguments of ``tf.distribute``'s function that have no meaning here.

    Raises:
        TypeError: If the first argument is neither a resolver nor None.
        UnsupportedError: If another argument is given.
    """
    refuse_arguments("connect_to_cluster", given)
    checked_resolver(cluster_spec_or_resolver)


def initialize_tpu_system(cluster_resolver: ClusterResolver | None = None) -> Topology:
    """Returns the coordinates of this job's TPUs; in a job, all workers must call this function.

    Devices that are not TPUs get the coordinates of a grid that is as square as possible.

    Example::

        topology = kd.tpu.initialize_tpu_system(kd.cluster_resolver.TPUClusterResolver())
        print(topology.mesh_shape, topology.num_tasks, topology.num_tpus_per_task)

    Source: https://www.tensorflow.org/api_docs/python/tf/tpu/experimental/initialize_tpu_system

    Args:
        cluster_resolver: Describes the workers; None means the same as for `kerasdist.TPUStrategy`.

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
        """Lets users write ``kerasdist.tpu.experimental``, as in ``tf.tpu.experimental``.

        The name `experimental` stands for this module itself. For other names that TensorFlow has
        in ``tf.tpu``, the error says what to write instead.
        """
        module = sys.modules[__name__]
        return module if name == "experimental" else resolve("kerasdist.tpu", module, name)
