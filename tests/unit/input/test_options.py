"""Options and contexts of datasets."""

import pytest

from kerasdist.input.options import InputContext, InputOptions, InputReplicationMode, ValueContext


def test_the_defaults_are_those_of_tensorflow():
    options = InputOptions()
    assert options.experimental_fetch_to_device
    assert options.experimental_replication_mode is InputReplicationMode.PER_WORKER
    assert not options.experimental_place_dataset_on_device
    assert options.experimental_per_replica_buffer_size == 1
    assert InputContext() == InputContext(1, 0, 1)
    assert ValueContext() == ValueContext(0, 1)


@pytest.mark.parametrize("size", [0, -1])
def test_a_buffer_holds_a_batch_at_least(size):
    with pytest.raises(ValueError, match=r"Expected experimental_per_replica_buffer_size.*Rece"):
        InputOptions(experimental_per_replica_buffer_size=size)


def test_the_batch_size_of_a_replica():
    context = InputContext(num_replicas_in_sync=4)
    assert context.get_per_replica_batch_size(12) == 3
    assert context.get_per_replica_batch_size(0) == 0
    with pytest.raises(ValueError, match=r"multiple of the number of replicas.*Received: global_"):
        context.get_per_replica_batch_size(13)
