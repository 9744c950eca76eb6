"""Options, reductions and contexts, as users give them."""

import enum
from typing import Any

import pytest

from kerasdist.api.options import CommunicationImplementation, CommunicationOptions, ReduceOp
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


# As TensorFlow's own; the values of the policy are numbers.
THEIRS = enum.Enum("Theirs", {"SUM": "SUM"})
THEIR_POLICY = enum.IntEnum("TheirPolicy", {"FILE": 1})


@pytest.mark.parametrize(
    ("given", "read", "expected"),
    [
        *((given, ReduceOp.of, ReduceOp.SUM) for given in ("sum", "Sum", ReduceOp.SUM, THEIRS.SUM)),
        *(
            (given, lambda one: InputOptions(auto_shard_policy=one).auto_shard_policy, policy)
            for policy in (AutoShardPolicy.FILE,)
            for given in ("FILE", "file", policy, THEIR_POLICY.FILE)
        ),
        *(
            (given, lambda one: CommunicationOptions(implementation=one).implementation, ring)
            for ring in (CommunicationImplementation.RING,)
            for given in ("RING", "ring", ring)
        ),
    ],
)
def test_a_choice_by_any_name(given, read, expected):
    assert read(given) is expected


def test_what_tf_distribute_takes_too():
    """None is the default, 0 no batch ahead; a dataset is on a device with PER_REPLICA alone."""
    assert InputOptions(experimental_fetch_to_device=None).experimental_fetch_to_device is True
    assert InputOptions(experimental_per_replica_buffer_size=0)
    for fetch, mode in ((True, "PER_REPLICA"), (None, "PER_REPLICA"), (False, "PER_WORKER")):
        with pytest.raises(ValueError, match=r"with PER_REPLICA and.*=False. Received: exp.*=True"):
            InputOptions(fetch, mode, True)
    assert InputOptions(False, "PER_REPLICA", True).experimental_place_dataset_on_device


WRONG: list[tuple[type, str, Any]] = [
    (InputOptions, "auto_shard_policy", "FILES"),
    (InputOptions, "auto_shard_policy", 7),
    (InputOptions, "experimental_replication_mode", "PER_HOST"),
    (InputOptions, "experimental_replication_mode", None),
    (InputOptions, "experimental_fetch_to_device", "no"),
    (InputOptions, "experimental_place_dataset_on_device", 1),
    *((InputOptions, "experimental_per_replica_buffer_size", size) for size in ("2", -1)),
    *((CommunicationOptions, "bytes_per_pack", size) for size in (-1, "64")),
    *((CommunicationOptions, "timeout_seconds", seconds) for seconds in (0, -1.0, "5")),
    *((CommunicationOptions, "implementation", name) for name in ("MPI", 7)),
    (CommunicationOptions, "compression", "zip"),
]


@pytest.mark.parametrize(("options", "name", "value"), WRONG)
def test_options_that_mean_nothing(options, name, value):
    with pytest.raises(ValueError, match=f"Expected {name} .*Received: {name}="):
        options(**{name: value})
