"""Batches in pieces, and datasets of them: the edges that no case of the facade reaches."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kerasdist.api.strategy import Strategy
from kerasdist.errors import InputError, UnsupportedError
from kerasdist.input.distributed import distributed, from_function
from kerasdist.input.fit_adapter import whole
from kerasdist.input.options import InputOptions, InputReplicationMode
from kerasdist.input.sharding import split_batch

PER_REPLICA = InputOptions(experimental_replication_mode=InputReplicationMode.PER_REPLICA)


@given(st.integers(0, 40), st.integers(1, 6))
def test_pieces_put_together_are_the_batch(rows, replicas):
    batch = {"x": np.arange(rows), "y": [np.arange(2 * rows).reshape(rows, 2)], "z": 7}
    pieces = split_batch(batch, replicas)
    assert len(pieces) == replicas
    np.testing.assert_array_equal(np.concatenate([one["x"] for one in pieces]), batch["x"])
    np.testing.assert_array_equal(np.concatenate([one["y"][0] for one in pieces]), batch["y"][0])
    sizes = [len(one["x"]) for one in pieces]
    assert sizes == [len(one["y"][0]) for one in pieces]
    assert max(sizes) - min(sizes) <= 1
    assert all(one["z"] == 7 for one in pieces)


@pytest.fixture
def strategy():
    return Strategy(None)


def test_a_buffer_reads_ahead_by_its_size_and_no_more(strategy):
    read = []

    def batches():
        for index in range(5):
            read.append(index)
            yield np.full(1, index)

    options = InputOptions(experimental_per_replica_buffer_size=2)
    data = distributed(batches(), strategy, options)
    assert distributed(data, strategy, options) is data
    next(iter(data))
    assert read == [0, 1, 2]


@pytest.mark.parametrize("source", ["text", b"bytes", {"x": 1}, 3, None])
def test_what_is_no_dataset_is_refused_at_once(strategy, source):
    with pytest.raises(InputError, match=r"Expected a dataset.*Received: dataset of type"):
        from_function(lambda _: source, strategy, InputOptions())


def test_one_dataset_has_one_pipeline(strategy):
    with pytest.raises(UnsupportedError, match=r"PER_WORKER.*Received: options=.*from_function"):
        distributed([np.zeros(2)], strategy, PER_REPLICA)


@pytest.mark.parametrize("name", ["y", "sample_weight", "class_weight"])
def test_in_fit_nothing_stands_beside_it(strategy, name):
    data = distributed([np.zeros(2)], strategy, InputOptions())
    with pytest.raises(InputError, match=f"Expected nothing beside.*Received: {name}"):
        whole(data, **{name: np.zeros(2)})
