"""Chooses the devices of replicas that have several devices, and how tensors are cut over them.

This module computes only with integers, and needs no framework. The devices of one replica are
called its logical devices. They form a mesh: their number is a product of primes, and each prime is
the size of one axis of the mesh. To cut a tensor into one shard for each logical device, each axis
of the mesh is assigned to one axis of the tensor, and cuts the tensor along that axis.
"""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, final

import numpy as np

from kerasdist.core.earlier_names import EarlierNames, refuse_arguments


class DeviceOrderMode(enum.IntEnum):
    """The order in which a `DeviceAssignment` takes devices.

    `DeviceAssignment.build` refuses RING, because XLA finds rings of devices by itself.

    Source: https://www.tensorflow.org/api_docs/python/tf/tpu/experimental/DeviceOrderMode
    """

    AUTO = 0
    RING = 1
    MESH = 2


@final
class Topology(EarlierNames):
    """The coordinates of devices in a TPU's mesh of chips: x, y, z and the core on the chip.

    `kerasdist.tpu.initialize_tpu_system` returns the topology of this job's devices.

    Example::

        places = [[(0, 0, 0, 0), (1, 0, 0, 0)]]  # of one worker
        topology = kd.tpu.Topology(mesh_shape=(2, 1, 1, 1), device_coordinates=places)
        print(topology.num_tasks, topology.num_tpus_per_task)

    Source: https://www.tensorflow.org/api_docs/python/tf/tpu/experimental/Topology

    Attributes:
        mesh_shape: The size of the mesh along each axis.
        device_coordinates: The coordinates of each device, indexed by worker and by device of the
            worker.
    """

    def __init__(
        self,
        serialized: None = None,
        mesh_shape: Sequence[int] | None = None,
        device_coordinates: Any = None,
    ) -> None:
        """Makes a topology from the size of a mesh and the coordinates of its devices.

        Args:
            serialized: Must be None. To save or send a topology, pickle the topology itself.
            mesh_shape: Four positive numbers.
            device_coordinates: An array of shape (workers, devices of each worker, 4).

        Raises:
            ValueError: If `mesh_shape` or `device_coordinates` has a wrong shape, or a coordinate
                is outside of the mesh.
        """
        refuse_arguments("Topology", {"serialized": serialized})
        self.mesh_shape = np.asarray(() if mesh_shape is None else mesh_shape, np.int32)
        self.device_coordinates = np.asarray(device_coordinates, np.int32)
        is_mesh = self.mesh_shape.shape == (4,) and self.mesh_shape.min() > 0
        places = self.device_coordinates
        is_placed = is_mesh and places.ndim == 3 and places.shape[2] == 4
        if not (is_placed and (places >= 0).all() and (places < self.mesh_shape).all()):
            raise ValueError(
                "Expected mesh_shape to be four positive numbers, and device_coordinates of shape "
                f"(workers, devices, 4), in the mesh. Received: mesh_shape={mesh_shape!r}, "
                f"device_coordinates={device_coordinates!r:.200}."
            )
        self._devices = np.full((*self.mesh_shape, 2), -1, np.int32)
        for task, device in np.ndindex(places.shape[:2]):
            self._devices[tuple(places[task, device])] = task, device

    @classmethod
    def grid(cls, num_tasks: int, per_task: int) -> Topology:
        """Returns a topology for devices that have no coordinates.

        The devices get places in a grid that is as square as possible.

        Args:
            num_tasks: Number of workers.
            per_task: Number of devices of each worker.
        """
        count = num_tasks * per_task
        width = max(one for one in range(1, math.isqrt(count) + 1) if count % one == 0)
        places = [(i % width, i // width, 0, 0) for i in range(count)]
        return cls(None, (width, count // width, 1, 1), np.reshape(places, (num_tasks, -1, 4)))

    @property
    def mesh_rank(self) -> int:
        """The number of axes of the mesh."""
        return len(self.mesh_shape)

    @property
    def num_tasks(self) -> int:
        """The number of workers."""
        return self.device_coordinates.shape[0]

    @property
    def num_tpus_per_task(self) -> int:
        """The number of devices of each worker."""
        return self.device_coordinates.shape[1]

    @property
    def missing_devices(self) -> Any:
        """The coordinates in the mesh at which there is no device."""
        return np.argwhere(self._devices[..., 0] < 0)

    def task_ordinal_at_coordinates(self, device_coordinates: Sequence[int]) -> int:
        """Returns the number of the worker that has the device at these coordinates."""
        return int(self._devices[tuple(device_coordinates)][0])

    def tpu_device_ordinal_at_coordinates(self, device_coordinates: Sequence[int]) -> int:
        """Returns the number of the device at these coordinates among its worker's devices."""
        return int(self._devices[tuple(device_coordinates)][1])

    def __repr__(self) -> str:
        return f"Topology(mesh_shape={self.mesh_shape.tolist()}, num_tasks={self.num_tasks})"


@final
class DeviceAssignment(EarlierNames):
    """How many replicas there are, and which devices each of them has.

    Example::

        assignment = kd.DeviceAssignment.build(num_replicas=1, computation_shape=[2])
        strategy = kd.TPUStrategy(experimental_device_assignment=assignment)

    Source: https://www.tensorflow.org/api_docs/python/tf/tpu/experimental/DeviceAssignment

    Attributes:
        SINGLE_CORE: One replica on one device.
        topology: The mesh that contains the devices.
        core_assignment: The coordinates of each replica's logical devices, as an array of shape
            (replicas, devices of a replica, 4).
    """

    SINGLE_CORE: ClassVar[DeviceAssignment]

    def __init__(self, topology: Topology, core_assignment: Any) -> None:
        """Makes an assignment from given coordinates; `build` chooses coordinates itself.

        Args:
            topology: The mesh that contains the devices.
            core_assignment: The coordinates of each replica's devices, as an array of shape
                (replicas, devices of a replica, 4). Each device may occur only once.

        Raises:
            ValueError: If a device does not exist or occurs twice in the assignment.
        """
        self.topology = topology
        self.core_assignment = np.asarray(core_assignment, np.int32)
        cores = self.core_assignment
        places = {tuple(place) for place in cores.reshape(-1, cores.shape[-1]).tolist()}
        there = {tuple(place) for place in topology.device_coordinates.reshape(-1, 4).tolist()}
        if cores.ndim != 3 or len(places) < math.prod(cores.shape[:2]) or not places <= there:
            raise ValueError(
                "Expected core_assignment of shape (replicas, devices of a replica, 4), of "
                f"coordinates of devices of {topology}, none twice. Received: "
                f"core_assignment={core_assignment!r:.200}."
            )

    @classmethod
    def build(
        cls,
        topology: Topology | int | None = None,
        computation_shape: Sequence[int] | None = None,
        computation_stride: Sequence[int] | None = None,
        num_replicas: int = 1,
        device_order_mode: DeviceOrderMode = DeviceOrderMode.AUTO,
    ) -> DeviceAssignment:
        """Makes an assignment in which each replica is a block of devices in the mesh.

        Args:
            topology: The topology from `kerasdist.tpu.initialize_tpu_system`. None means that the
                replicas take devices in the order of the devices' numbers. An integer ``n`` means
                the same as None with ``num_replicas=n``.
            computation_shape: Number of devices of a replica along each axis. If the mesh has size
                1 along z or along the axis of cores, the devices of a replica that would lie along
                that axis are neighbours along x or y instead.
            computation_stride: The distance between a replica's devices along each axis; None
                means 1.
            num_replicas: Number of replicas.
            device_order_mode: AUTO or MESH; both take the devices of the mesh row by row.

        Raises:
            ValueError: If a number is not positive, or if the devices are too few for the replicas.
            UnsupportedError: For `DeviceOrderMode.RING`.
        """
        rings = device_order_mode == DeviceOrderMode.RING
        refuse_arguments("DeviceAssignment.build", {"device_order_mode": rings and "RING"})
        if isinstance(topology, int):
            topology, num_replicas = None, topology
        shape = np.atleast_1d((1, 1, 1, 1) if computation_shape is None else computation_shape)
        stride = np.atleast_1d((1, 1, 1, 1) if computation_stride is None else computation_stride)
        if topology is None and num_replicas > 0 and shape.min(initial=1) > 0:
            topology = Topology.grid(1, num_replicas * math.prod(shape))
            return cls(topology, topology.device_coordinates.reshape(num_replicas, -1, 4))
        blocks = None if topology is None else _blocks(topology.mesh_shape, shape, stride)
        if topology is None or blocks is None or not 0 < num_replicas <= len(blocks):
            fit = "" if blocks is None else f", of which {len(blocks)} fit"
            raise ValueError(
                "Expected positive numbers of replicas and of devices, and blocks that fit in the "
                f"topology. Received: num_replicas={num_replicas}{fit}, computation_shape="
                f"{shape.tolist()}, computation_stride={stride.tolist()}, topology={topology}."
            )
        # If the mesh has gaps, replicas are not blocks: they take devices in the order of the
        # devices' numbers.
        if topology.missing_devices.size:
            chips = topology.device_coordinates.reshape(-1, 4)[: num_replicas * math.prod(shape)]
            return cls(topology, chips.reshape(num_replicas, -1, 4))
        return cls(topology, blocks[:num_replicas])

    @property
    def num_replicas(self) -> int:
        """Number of replicas."""
        return self.core_assignment.shape[0]

    @property
    def num_cores_per_replica(self) -> int:
        """Number of logical devices of a replica."""
        return self.core_assignment.shape[1]

    def coordinates(self, replica: int, logical_core: int) -> tuple[int, ...]:
        """Returns the coordinates of a replica's logical device."""
        return tuple(self.core_assignment[replica, logical_core].tolist())

    def tpu_ordinal(self, replica: int = 0, logical_core: int = 0) -> int:
        """Returns the number of a replica's logical device, among its worker's devices."""
        return self.topology.tpu_device_ordinal_at_coordinates(
            self.coordinates(replica, logical_core)
        )

    def __repr__(self) -> str:
        of_each = self.num_cores_per_replica
        return (
            f"DeviceAssignment(num_replicas={self.num_replicas}, num_cores_per_replica={of_each})"
        )


DeviceAssignment.SINGLE_CORE = DeviceAssignment.build()


def _blocks(mesh: Any, shape: Any, stride: Any) -> Any | None:
    """Returns, for each block in a mesh, the coordinates of its devices.

    A block holds the devices of one replica. Returns None if no block fits in the mesh, or if
    `shape` or `stride` is not four positive numbers.
    """
    if not (len(shape) == len(stride) == 4 and shape.min() > 0 and stride.min() > 0):
        return None
    shape = np.array(shape)
    # If the mesh has size 1 along the axis of cores or along z, the devices that a replica should
    # have along that axis are taken along x or y instead.
    for axis in (3, 2):
        for factor in prime_factors(int(shape[axis])) if mesh[axis] == 1 else ():
            fits = [one for one in range(2) if shape[one] * factor * stride[one] <= mesh[one]]
            if fits:
                shape[axis] //= factor
                shape[fits[0]] *= factor
    counts = mesh // (shape * stride) * stride
    if not counts.all():
        return None
    own = np.stack(np.meshgrid(*map(np.arange, shape), indexing="ij"), -1).reshape(-1, 4) * stride
    order = [2, 1, 0, 3]  # blocks are numbered along the cores of a chip, then along x, y, z
    numbers = np.unravel_index(np.arange(math.prod(counts)), counts[order])
    at = np.stack(numbers, -1)[:, order]
    return (at // stride * shape * stride + at % stride)[:, None] + own


@final
@dataclass
class Splits:
    """Rules that say how variables are cut into shards: patterns that match the variables' paths.

    Attributes:
        logical_devices: Number of logical devices of a replica.
        rules: For each pattern, the number of shards along each axis. The first pattern that is
            found in a variable's path applies to the variable.
    """

    logical_devices: int
    rules: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def add(self, rules: Mapping[str, Sequence[int]]) -> None:
        """Appends rules. Each rule maps a pattern to the number of shards along each axis."""
        for pattern, shards in rules.items():
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(
                    "Expected patterns that are regular expressions. "
                    f"Received: pattern={pattern!r}: {error}."
                ) from error
            check_product(shards, self.logical_devices)
            self.rules[pattern] = tuple(shards)

    def shards_of(self, path: str, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns a variable's number of shards along each axis; all are 1 if it is not cut."""
        for pattern, shards in self.rules.items():
            if re.search(pattern, path):
                check_partition(shape, shards, self.logical_devices, of=f"variable {path!r}")
                return shards
        return (1,) * len(shape)


def check_partition(
    shape: Sequence[int | None], shards: Sequence[int], logical_devices: int, *, of: str = "tensor"
) -> None:
    """Raises ValueError if a tensor cannot be cut into these shards.

    The size of each axis must be a multiple of the number of shards along that axis. The product of
    the numbers of shards must be the number of logical devices. A size is None if it is not known.
    ``of`` names the tensor in the error message.
    """
    if len(shards) != len(shape):
        raise ValueError(
            f"Expected one number of shards for each of the {len(shape)} axes of the {of}. "
            f"Received: partition_dimensions={tuple(shards)}, shape={tuple(shape)}."
        )
    check_product(shards, logical_devices)
    uneven = [
        axis
        for axis, (size, count) in enumerate(zip(shape, shards, strict=True))
        if size is not None and size % count
    ]
    if uneven:
        raise ValueError(
            f"Expected axes of the {of} that can be cut into equal shards. Received: "
            f"partition_dimensions={tuple(shards)}, shape={tuple(shape)}, uneven along {uneven}."
        )


def check_product(shards: Sequence[int], logical_devices: int) -> None:
    """Raises ValueError unless the product of `shards` is the number of logical devices."""
    if math.prod(shards) != logical_devices or any(count < 1 for count in shards):
        raise ValueError(
            "Expected numbers of shards that multiply to the number of logical devices of a "
            f"replica, {logical_devices}. Received: partition_dimensions={tuple(shards)}."
        )


def prime_factors(number: int) -> tuple[int, ...]:
    """Returns the prime factors of a number, the smallest first; 1 has none."""
    factors: list[int] = []
    divisor = 2
    while number > 1:
        while number % divisor == 0:
            factors.append(divisor)
            number //= divisor
        divisor += 1
    return tuple(factors)


def mesh_axes(shards: Sequence[int], factors: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Returns, for each axis of a tensor, the axes of the mesh that cut the tensor along this axis.

    `shards` are the numbers of shards along the tensor's axes; `factors` are the sizes of the
    mesh's axes. Both have the same product, or all numbers in `shards` are 1.
    """
    free = list(range(len(factors)))
    result: list[tuple[int, ...]] = []
    for count in shards:
        taken: list[int] = []
        for prime in prime_factors(count):
            axis = next(axis for axis in free if factors[axis] == prime)
            free.remove(axis)
            taken.append(axis)
        result.append(tuple(taken))
    return tuple(result)
