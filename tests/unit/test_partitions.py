"""The arithmetic of several devices for one replica."""

import math
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kerasdist.core.partitions import (
    DeviceAssignment,
    Splits,
    Topology,
    check_partition,
    mesh_axes,
    prime_factors,
)


@given(st.lists(st.integers(1, 12), min_size=1, max_size=4))
def test_every_way_to_cut_finds_its_axes(shards):
    factors = prime_factors(math.prod(shards))
    axes = mesh_axes(shards, factors)
    used = [axis for own in axes for axis in own]
    assert sorted(used) == list(range(len(factors)))  # each once, none left
    assert [math.prod(factors[axis] for axis in own) for own in axes] == shards


def test_the_first_rule_that_fits_counts():
    splits = Splits(2)
    splits.add({"dense/kernel": (1, 2)})
    splits.add({"kernel": (2, 1)})
    assert splits.shards_of("model/dense/kernel", (4, 4)) == (1, 2)
    assert splits.shards_of("model/other/kernel", (4, 4)) == (2, 1)
    assert splits.shards_of("model/dense/bias", (4,)) == (1,)
    with pytest.raises(ValueError, match="variable 'model/dense/kernel'"):
        splits.shards_of("model/dense/kernel", (4, 3))
    with pytest.raises(ValueError, match="regular expressions"):
        splits.add({"(": (1, 2)})
    check_partition((None, 4), (1, 2), 2)  # a size that is not known fits


@pytest.mark.parametrize(
    ("count", "mesh"),
    [(1, (1, 1)), (2, (1, 2)), (4, (2, 2)), (8, (2, 4)), (16, (4, 4)), (7, (1, 7))],
)
def test_devices_without_a_place_make_a_grid(count, mesh):
    topology = Topology.grid(1, count)
    assert topology.mesh_shape.tolist() == [*mesh, 1, 1]
    assert (topology.num_tasks, topology.num_tpus_per_task) == (1, count)
    assert topology.missing_devices.size == 0
    for number, place in enumerate(topology.device_coordinates[0]):
        assert topology.tpu_device_ordinal_at_coordinates(place) == number


@pytest.mark.parametrize(
    ("shape", "stride", "replicas", "expected"),
    [
        ([1, 1, 1, 2], None, 1, [[0, 1]]),  # two cores: of neighbouring chips
        ([1, 1, 1, 2], None, 8, [[2 * i, 2 * i + 1] for i in range(8)]),
        ([1, 2, 2, 2], None, 2, [[0, 4, 1, 5, 2, 6, 3, 7], [8, 12, 9, 13, 10, 14, 11, 15]]),
        ([1, 1, 2, 2], None, 2, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ([1, 4, 1, 1], None, 2, [[0, 4, 8, 12], [1, 5, 9, 13]]),
        ([2, 2, 1, 1], None, 4, [[0, 4, 1, 5], [2, 6, 3, 7], [8, 12, 9, 13], [10, 14, 11, 15]]),
        ([2, 1, 1, 1], [2, 1, 1, 1], 3, [[0, 2], [1, 3], [4, 6]]),
        (None, None, 2, [[0], [1]]),
    ],
)
def test_replicas_are_blocks_of_the_mesh(shape, stride, replicas, expected):
    built = DeviceAssignment.build(Topology.grid(1, 16), shape, stride, replicas)
    numbers = range(built.num_cores_per_replica)
    found = [[built.tpu_ordinal(r, core) for core in numbers] for r in range(built.num_replicas)]
    assert found == expected


def test_workers_of_a_topology():
    """Of a slice with a chip missing, replicas take the devices in their order."""
    topology = Topology.grid(2, 2)
    assert [topology.task_ordinal_at_coordinates((0, y, 0, 0)) for y in (0, 1)] == [0, 1]
    holed = Topology(None, (2, 2, 1, 1), [[(0, 0, 0, 0), (0, 1, 0, 0)]])
    assert holed.missing_devices.tolist() == [[1, 0, 0, 0], [1, 1, 0, 0]]
    assert DeviceAssignment.build(holed, num_replicas=2).coordinates(1, 0) == (0, 1, 0, 0)
    again = pickle.loads(pickle.dumps(DeviceAssignment.build(topology)))
    assert str(again) == "DeviceAssignment(num_replicas=1, num_cores_per_replica=1)"


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda t: DeviceAssignment.build(0), "num_replicas=0, computation_shape"),
        (lambda t: DeviceAssignment.build(1, (0,)), r"computation_shape=\[0\]"),
        (lambda t: DeviceAssignment.build(t, [4, 1, 1, 1]), "blocks that fit in the topology"),
        (lambda t: DeviceAssignment.build(t, [2]), r"computation_shape=\[2\]"),
        (lambda t: DeviceAssignment.build(t, num_replicas=5), "num_replicas=5, of which 4 fit"),
        (lambda t: DeviceAssignment.build(t, device_order_mode=1), "without device_order_mode"),
        (lambda t: DeviceAssignment(t, [[[5, 0, 0, 0]]]), "none twice. Received: core_assignment"),
        (lambda t: DeviceAssignment(t, [[[0] * 4, [0] * 4]]), "none twice"),
        (lambda t: Topology(None, (2, 2, 1), [[[0] * 4]]), "to be four positive"),
        (lambda t: Topology(None, (1, 1, 1, 1), [[[0, 0, 0, 1]]]), "in the mesh. Received"),
        (lambda t: Topology(b"proto"), "without serialized.*Pickle the topology"),
    ],
)
def test_what_does_not_fit_a_topology_is_refused(make, said):
    with pytest.raises(
        (ValueError, NotImplementedError), match=f"Expected .*{said}|^Expected {said}"
    ):
        make(Topology.grid(1, 4))
