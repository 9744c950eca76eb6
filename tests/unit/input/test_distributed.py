"""Batches in pieces, and datasets of them, for one replica and by arithmetic alone."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kerasdist.api.strategy import Strategy
from kerasdist.errors import InputError, UnsupportedError
from kerasdist.input.distributed import DividedDataset, distributed, from_function
from kerasdist.input.fit_adapter import whole
from kerasdist.input.options import InputOptions, InputReplicationMode
from kerasdist.input.sharding import split_batch
from kerasdist.input.sources import batches_of

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


def test_what_has_no_rows_goes_to_all():
    pieces = split_batch((None, np.float32(2.0), "text"), 3)
    assert pieces == [(None, np.float32(2.0), "text")] * 3


def test_arrays_of_other_lengths_are_refused():
    with pytest.raises(InputError, match=r"Expected all arrays of a batch.*Received: shapes="):
        split_batch((np.zeros(3), np.zeros(4)), 2)


@pytest.fixture
def strategy():
    return Strategy(None)


def test_a_dataset_is_iterated_again_and_again(strategy):
    data = distributed([np.arange(2), np.arange(3)], strategy, InputOptions())
    assert isinstance(data, DividedDataset)
    assert len(data) == 2
    for _ in range(2):
        assert [len(batch) for batch in data] == [2, 3]


def test_a_distributed_dataset_is_distributed_once(strategy):
    data = distributed([np.arange(2)], strategy, InputOptions())
    assert distributed(data, strategy, InputOptions()) is data


@pytest.mark.parametrize("ahead", [1, 2, 9])
def test_a_buffer_loses_no_batch(strategy, ahead):
    options = InputOptions(experimental_per_replica_buffer_size=ahead)
    batches = [np.full(1, index) for index in range(4)]
    data = distributed(batches, strategy, options)
    assert [int(batch[0]) for batch in data] == [0, 1, 2, 3]


def test_a_buffer_reads_ahead_by_its_size_and_no_more(strategy):
    read = []

    def batches():
        for index in range(5):
            read.append(index)
            yield np.full(1, index)

    options = InputOptions(experimental_per_replica_buffer_size=2)
    next(iter(distributed(batches(), strategy, options)))
    assert read == [0, 1, 2]


@pytest.mark.parametrize("source", ["text", b"bytes", {"x": 1}, 3, None])
def test_what_is_no_dataset_is_refused_at_once(strategy, source):
    with pytest.raises(InputError, match=r"Expected a dataset.*Received: dataset of type"):
        distributed(source, strategy, InputOptions())
    with pytest.raises(InputError, match=r"Expected a dataset.*Received: dataset of type"):
        from_function(lambda _: source, strategy, InputOptions())


def test_one_dataset_has_one_pipeline(strategy):
    with pytest.raises(UnsupportedError, match=r"PER_WORKER.*Received: options=.*from_function"):
        distributed([np.zeros(2)], strategy, PER_REPLICA)


def test_a_function_is_told_its_pipeline(strategy):
    seen = []
    for options in (InputOptions(), PER_REPLICA):
        list(from_function(lambda c: seen.append(c) or [np.zeros(2)], strategy, options))
    assert [(c.num_input_pipelines, c.input_pipeline_id) for c in seen] == [(1, 0)] * 2


def test_batches_of_anything_that_is_iterated():
    again = batches_of((1, 2))
    assert [list(again()), list(again())] == [[1, 2], [1, 2]]


class TestForFit:
    def batches(self, data):
        adapter = whole(data)
        return [list(adapter.get_numpy_iterator()) for _ in range(2)], adapter.num_batches

    def test_a_list_is_read_anew_for_each_epoch(self, strategy):
        batches = [(np.full((2, 1), index), np.zeros(2)) for index in range(3)]
        found, count = self.batches(distributed(batches, strategy, InputOptions()))
        assert count == 3
        for epoch in found:
            assert [int(x[0, 0]) for x, _ in epoch] == [0, 1, 2]

    def test_bare_arrays_and_lists_become_tuples(self, strategy):
        for batch in (np.zeros(2), [np.zeros(2)]):
            found, _ = self.batches(distributed([batch], strategy, InputOptions()))
            assert [len(one) for one in found[0]] == [1]

    def test_without_a_length(self, strategy):
        class Again:
            def __iter__(self):
                return iter([(np.zeros(2),)])

        found, count = self.batches(distributed(Again(), strategy, InputOptions()))
        assert count is None
        assert [len(epoch) for epoch in found] == [1, 1]

    def test_a_generator_is_handed_on(self, strategy):
        generator = (batch for batch in [np.zeros(2)])
        assert whole(distributed(generator, strategy, InputOptions())) is generator

    @pytest.mark.parametrize("name", ["y", "sample_weight", "class_weight"])
    def test_nothing_stands_beside_it(self, strategy, name):
        data = distributed([np.zeros(2)], strategy, InputOptions())
        with pytest.raises(InputError, match=f"Expected nothing beside.*Received: {name}"):
            whole(data, **{name: np.zeros(2)})

    def test_another_frameworks_dataset_is_handed_on(self):
        theirs = frozenset()
        assert whole(theirs) is theirs
