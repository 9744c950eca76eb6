"""The narrow waist: what kerasdist needs to know of a framework.

`Backend` is what a framework is: its devices. `ReplicaSet` is a choice of devices and how to
compute on them. `Collectives` is what one replica's code can ask of the others. Everything above
speaks to these three; everything that names a framework stands below them, in a folder of its own.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

from kerasdist.devices import Device

BatchNorm = Literal["synchronized", "per_replica"]


@dataclass(frozen=True)
class ReplicaOptions:
    """How a strategy wants its replicas to compute.

    Attributes:
        batch_norm: ``"synchronized"``: BatchNormalization uses the mean and variance of the global
            batch. ``"per_replica"``: each replica uses its own, and the moving statistics are
            averaged.
    """

    batch_norm: BatchNorm = "synchronized"


class Backend(abc.ABC):
    """What a framework is."""

    name: str

    @abc.abstractmethod
    def devices(self, kind: str) -> tuple[Device, ...]:
        """Returns this machine's devices of one kind, starting the framework if need be.

        Args:
            kind: ``"cpu"``, ``"gpu"`` or ``"tpu"``.
        """

    @abc.abstractmethod
    def prepare_cpu_devices(self, count: int) -> None:
        """Makes `count` logical CPU devices, as far as the framework has not started.

        Args:
            count: How many there should be, at least 1.

        Raises:
            DeviceError: If the framework has started with fewer.
        """

    @abc.abstractmethod
    def replica_set(self, devices: Sequence[Device], options: ReplicaOptions) -> ReplicaSet:
        """Returns the means to compute on `devices`, one replica each.

        Args:
            devices: Devices of this machine, none twice.
            options: How to compute.

        Raises:
            UnsupportedError: If the framework cannot have what `options` ask for.
        """

    def accelerators(self) -> tuple[Device, ...]:
        """Returns this machine's accelerators: its TPUs, else its GPUs, else none."""
        return self.devices("tpu") or self.devices("gpu")


class ReplicaSet(abc.ABC):
    """Devices, one replica on each, and how to compute on them.

    Attributes:
        devices: The devices, replica 0's first.
        options: How the replicas compute.
    """

    def __init__(self, devices: Sequence[Device], options: ReplicaOptions) -> None:
        """Makes the set.

        Args:
            devices: Devices of this machine, none twice.
            options: How to compute.
        """
        self.devices = tuple(devices)
        self.options = options

    @property
    def num_replicas(self) -> int:
        """How many replicas there are."""
        return len(self.devices)

    @property
    @abc.abstractmethod
    def trainer_class(self) -> type[Any]:
        """The class that is put before a model's own, so that its steps run on the replicas."""

    @abc.abstractmethod
    def data_adapter(self, adapter: Any) -> Any:
        """Returns a Keras data adapter that yields global batches as `trainer_class` takes them.

        Args:
            adapter: The adapter that Keras made for the data of a call of `fit`, `evaluate`,
                `predict`.
        """

    @abc.abstractmethod
    def placement(self) -> AbstractContextManager[Any]:
        """Returns a context in which variables are made where and as the replicas need them."""


class Collectives(abc.ABC):
    """What the code of one replica can ask of the others. All replicas must call the same.

    Attributes:
        weighs_scaled_losses: Whether a loss that a LossScaleOptimizer scales gets the replica's
            weight before that, so that `apply_gradients` does not weigh its gradients again.
    """

    weighs_scaled_losses = False

    def assign(self, variable: Any, value: Any, write: Callable[[Any, Any], Any]) -> Any:
        """Assigns to a Keras variable in replica code, where nothing else catches the write.

        Args:
            variable: The variable.
            value: A tensor of its type.
            write: Keras's own assignment, of a variable and a value.
        """
        return write(variable, value)

    @abc.abstractmethod
    def all_sum(self, tensors: Sequence[Any]) -> list[Any]:
        """Returns each tensor summed over the replicas, with its gradient.

        The gradient is an all-sum again; where the one-device contract holds, one that counts each
        replica by its share of the batch (docs/numerics.md). All replicas must call it, with as
        many tensors of the same shapes and types.

        Args:
            tensors: Tensors of this replica.
        """

    @abc.abstractmethod
    def all_gather(self, tensor: Any) -> Any:
        """Returns the replicas' tensors, one after another along axis 0, with their gradient.

        All replicas must call it; the sizes along axis 0 may differ, all else is equal.

        Args:
            tensor: A tensor of this replica, of at least one dimension.
        """

    @abc.abstractmethod
    def apply_gradients(
        self, optimizer: Any, gradients: list[Any], variables: list[Any] | None
    ) -> None:
        """Sums gradients over the replicas, then updates the variables once, everywhere.

        The one-device contract holds: each replica's gradients are weighted by its share of the
        batch first. All replicas must call it.

        Args:
            optimizer: A Keras optimizer.
            gradients: This replica's gradients; None where there is none.
            variables: The variables they belong to, or None for all that the optimizer knows.
        """


class SoleReplica(Collectives):
    """The collectives of a replica that is alone."""

    def all_sum(self, tensors: Sequence[Any]) -> list[Any]:
        """Returns the tensors themselves."""
        return list(tensors)

    def all_gather(self, tensor: Any) -> Any:
        """Returns the tensor itself."""
        return tensor

    def apply_gradients(
        self, optimizer: Any, gradients: list[Any], variables: list[Any] | None
    ) -> None:
        """Lets the optimizer do as it does on one device."""
        optimizer.apply(gradients, variables)
