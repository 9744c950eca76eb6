"""Options and contexts of datasets."""

import enum

import pytest

from kerasdist.input.options import (
    AutoShardPolicy,
    InputContext,
    InputOptions,
    InputReplicationMode,
    ValueContext,
)


def test_the_defaults_are_those_of_tensorflow():
    options = InputOptions()
    assert options.experimental_fetch_to_device
    assert options.experimental_replication_mode is InputReplicationMode.PER_WORKER
    assert not options.experimental_place_dataset_on_device
    assert options.experimental_per_replica_buffer_size == 1
    assert InputContext() == InputContext(1, 0, 1)
    assert ValueContext() == ValueContext(0, 1)


def test_the_batch_size_of_a_replica():
    context = InputContext(num_replicas_in_sync=4)
    assert context.get_per_replica_batch_size(12) == 3
    assert context.get_per_replica_batch_size(0) == 0
    with pytest.raises(ValueError, match=r"multiple of the number of replicas.*Received: global_"):
        context.get_per_replica_batch_size(13)


class Theirs(enum.IntEnum):
    """As TensorFlow's own, whose values are numbers."""

    FILE = 1


@pytest.mark.parametrize("given", ["FILE", "file", AutoShardPolicy.FILE, Theirs.FILE])
def test_a_policy_by_any_name(given):
    made = InputOptions(auto_shard_policy=given, experimental_replication_mode="per_replica")
    assert made.auto_shard_policy is AutoShardPolicy.FILE
    assert made.experimental_replication_mode is InputReplicationMode.PER_REPLICA


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("auto_shard_policy", "FILES"),
        ("auto_shard_policy", 7),
        ("experimental_replication_mode", "PER_HOST"),
        ("experimental_replication_mode", None),
        ("experimental_fetch_to_device", "no"),
        ("experimental_place_dataset_on_device", 1),
        *(("experimental_per_replica_buffer_size", size) for size in ("2", 0, -1)),
    ],
)
def test_options_that_mean_nothing(name, value):
    with pytest.raises(ValueError, match=f"Expected {name} to be .*Received: {name}="):
        InputOptions(**{name: value})
