"""Where variables' values rest between programs, and how they get onto the mesh and off it."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any, final

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from kerasdist.backends.jax.layout import AXIS

_assembled = jax.make_array_from_single_device_arrays


class Rest(abc.ABC):
    """Where values rest while no program has them.

    Attributes:
        device: Where new ones are made.
        after_each_step: Whether they go back there after every step of `fit`, or only when somebody
            reads them.
    """

    after_each_step = False

    def __init__(self, device: Any) -> None:
        """Notes where new values are made.

        Args:
            device: The device.
        """
        self.device = device

    @abc.abstractmethod
    def settled(self, arrays: list[Any], targets: Sequence[NamedSharding]) -> list[Any]:
        """Returns arrays as they rest, moving only what is elsewhere; the same list, if all is.

        Args:
            arrays: Arrays, anywhere.
            targets: How each lies on the mesh.
        """

    @abc.abstractmethod
    def entered(self, arrays: list[Any], targets: Sequence[NamedSharding]) -> list[Any]:
        """Returns resting arrays as a program takes them.

        Args:
            arrays: What `settled` returned.
            targets: How each lies on the mesh.
        """

    @abc.abstractmethod
    def left(self, arrays: list[Any]) -> list[Any]:
        """Returns a program's arrays as they rest.

        Args:
            arrays: Arrays on the mesh, or at rest already.
        """


@final
class OnMesh(Rest):
    """On the mesh itself."""

    def settled(self, arrays: list[Any], targets: Sequence[NamedSharding]) -> list[Any]:
        """Sends to every device what is not there yet, in one transfer."""
        return moved(arrays, targets)

    def entered(self, arrays: list[Any], targets: Sequence[NamedSharding]) -> list[Any]:
        """Returns the arrays."""
        del targets
        return arrays

    def left(self, arrays: list[Any]) -> list[Any]:
        """Returns the arrays."""
        return arrays


@final
class AtHome(Rest):
    """On one device alone."""

    after_each_step = True

    def __init__(self, device: Any) -> None:
        """Notes the device.

        Args:
            device: The device.
        """
        super().__init__(device)
        self._there = SingleDeviceSharding(device)

    def settled(self, arrays: list[Any], targets: Sequence[NamedSharding]) -> list[Any]:
        """Sends home what is elsewhere."""
        del targets
        return self.left(arrays)

    def entered(self, arrays: list[Any], targets: Sequence[NamedSharding]) -> list[Any]:
        """Copies to every device."""
        return jax.device_put(arrays, list(targets))

    def left(self, arrays: list[Any]) -> list[Any]:
        """Sends home what is elsewhere."""
        if all(is_placed(one, self._there) and one.committed for one in arrays):
            return arrays
        return [
            one
            if one.committed and one.sharding == self._there
            else jax.device_put(one.addressable_data(0), self._there)
            for one in arrays
        ]


@final
class OnWorker(Rest):
    """On the devices of this process, whole on each of them.

    On a mesh of many processes an array is global: whoever computes with it computes on all
    devices of the mesh, so all processes must do the same. Between programs one of them may do
    something by itself, such as saving. So the values rest as arrays of this process. Both kinds
    are views of the same buffers: to assemble a global array, or to take the local one from it,
    copies nothing.
    """

    def __init__(self, devices: Sequence[Any]) -> None:
        """Notes the devices.

        Args:
            devices: The mesh's devices of this process.
        """
        super().__init__(devices[0])
        self._sole = len(devices) == 1
        self.whole: Sharding = (
            SingleDeviceSharding(devices[0])
            if self._sole
            else NamedSharding(Mesh(list(devices), (AXIS,)), PartitionSpec())
        )

    def settled(self, arrays: list[Any], targets: Sequence[NamedSharding]) -> list[Any]:
        """Sends to the devices here what is not there yet, in one transfer."""
        del targets
        return moved(self.left(arrays), [self.whole] * len(arrays))

    def entered(self, arrays: list[Any], targets: Sequence[NamedSharding]) -> list[Any]:
        """Assembles global arrays."""
        if self._sole:  # each is its only shard
            pairs = zip(arrays, targets, strict=True)
            return [_assembled(array.shape, target, [array]) for array, target in pairs]
        return [
            _assembled(array.shape, target, [shard.data for shard in array.addressable_shards])
            for array, target in zip(arrays, targets, strict=True)
        ]

    def left(self, arrays: list[Any]) -> list[Any]:
        """Takes the local arrays from global ones."""
        if all(one.is_fully_addressable for one in arrays):
            return arrays
        return [one if one.is_fully_addressable else self._local(one) for one in arrays]

    def _local(self, array: Any) -> Any:
        if self._sole:
            return array.addressable_data(0)
        parts = [shard.data for shard in array.addressable_shards]
        return _assembled(array.shape, self.whole, parts)


def moved(arrays: list[Any], targets: Sequence[Sharding]) -> list[Any]:
    """Sends what is elsewhere, in one transfer; returns the same list, if nothing is.

    Args:
        arrays: Arrays.
        targets: Where each belongs.
    """
    pairs = enumerate(zip(arrays, targets, strict=True))
    absent = [index for index, (array, target) in pairs if not is_placed(array, target)]
    if not absent:
        return arrays
    everywhere = list(arrays)
    placed = jax.device_put([arrays[i] for i in absent], [targets[i] for i in absent])
    for index, array in zip(absent, placed, strict=True):
        everywhere[index] = array
    return everywhere


def is_placed(leaf: Any, sharding: Sharding) -> bool:
    """Returns whether a leaf is an array that lies in a way.

    Args:
        leaf: Anything.
        sharding: The way.
    """
    # Mostly it is the same object, and to compare meshes takes time.
    return isinstance(leaf, jax.Array) and (leaf.sharding is sharding or leaf.sharding == sharding)
