"""Replicas of several devices each: TPUs, and on JAX devices of any kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

from kerasdist.backends import registry
from kerasdist.backends.base import Backend, ReplicaSet
from kerasdist.backends.options import ReplicaOptions
from kerasdist.errors import DeviceError, UnsupportedError
from kerasdist.partitions import DeviceAssignment
from kerasdist.strategies.choice import chosen_devices, require_no_other_workers
from kerasdist.strategy import Strategy
from kerasdist.training import hooks


@final
class TPUStrategy(Strategy):
    """Synchronous training on TPUs, with a model on one device or cut over several.

    On JAX the devices are this machine's TPUs, else its GPUs, else its CPU devices. A replica may
    have several of them, its logical devices: `split_variables` says which variables are cut over
    them, so that a model trains that does not fit one device, and `fit` still gives the numbers of
    one. On TensorFlow and PyTorch it is refused.

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/TPUStrategy
    """

    def __init__(
        self,
        tpu_cluster_resolver: Any = None,
        experimental_device_assignment: DeviceAssignment | None = None,
        experimental_spmd_xla_partitioning: bool = False,
    ) -> None:
        """Makes the strategy.

        Args:
            tpu_cluster_resolver: As in TensorFlow; not needed on JAX, which finds its devices.
            experimental_device_assignment: How many replicas there are, and how many devices each
                has. None: one replica on each device.
            experimental_spmd_xla_partitioning: Whether XLA divides the program; on JAX it always
                does.

        Raises:
            JobError: In a worker of a job of several; see `kerasdist.MultiWorkerMirroredStrategy`.
            DeviceError: If there are not enough devices.
            UnsupportedError: On TensorFlow and PyTorch.
        """
        require_no_other_workers("TPUStrategy")
        del tpu_cluster_resolver, experimental_spmd_xla_partitioning
        super().__init__(_replicas(registry.current(), experimental_device_assignment))
        hooks.install()

    def experimental_split_to_logical_devices(
        self, tensor: Any, partition_dimensions: Sequence[int]
    ) -> Any:
        """Cuts a tensor over the logical devices of a replica.

        Args:
            tensor: A tensor of the model's or the step's computation.
            partition_dimensions: Number of pieces along each axis.

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
            rules: For each pattern, searched for in a variable's path, the number of pieces along
                each axis; the first that fits counts. They add to those given before, and hold
                from the next call of `fit`, `evaluate` or `predict` on.

        Raises:
            ValueError: If a pattern is no regular expression, or the pieces do not multiply to the
                number of logical devices. Where a rule does not fit a variable's shape, the call
                that uses the variable raises it.
        """
        self._devices_of_replica.split_variables(rules)

    @property
    def _devices_of_replica(self) -> Any:
        assert self.replica_set is not None
        if self.replica_set.logical_devices is None:
            raise UnsupportedError(
                "Expected several devices, over which tensors and variables can be cut. Received: "
                f"devices={[str(device) for device in self.replica_set.devices]}. Leave the call "
                "out."
            )
        return self.replica_set.logical_devices


def _replicas(backend: Backend, assignment: DeviceAssignment | None) -> ReplicaSet:
    if backend.tpu_refusal is not None:
        raise UnsupportedError(backend.tpu_refusal)
    devices = chosen_devices(backend, None)
    assignment = assignment or DeviceAssignment.build(len(devices))
    per_replica = assignment.num_cores_per_replica
    needed = assignment.num_replicas * per_replica
    if needed > len(devices):
        raise DeviceError(
            f"Expected {needed} devices for {assignment.num_replicas} replicas of {per_replica} "
            f"each. Received: devices={[str(device) for device in devices]}. To try it without "
            f"accelerators, call kerasdist.config.set_logical_cpu_devices({needed}) before JAX "
            "starts."
        )
    return backend.replica_set(devices[:needed], ReplicaOptions(devices_per_replica=per_replica))
