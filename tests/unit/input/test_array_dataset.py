"""Arrays as a dataset of rows."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kerasdist.errors import InputError
from kerasdist.input.array_dataset import RowDataset


@given(st.integers(0, 40), st.integers(1, 9), st.booleans())
def test_batches_are_all_rows_in_order(rows, size, drop):
    data = RowDataset(np.arange(rows)).batch(size, drop_remainder=drop)
    batches = list(data)
    assert len(batches) == len(data)
    kept = rows - rows % size if drop else rows
    assert [row for batch in batches for row in batch] == list(range(kept))
    assert all(len(batch) == size for batch in batches[:-1])


@given(st.integers(1, 40), st.integers(1, 9), st.integers(0, 99))
def test_shuffled_rows_are_all_rows_and_stay_together(rows, size, seed):
    data = RowDataset({"x": np.arange(rows), "y": [np.arange(rows) * 10]}).shuffle(seed).batch(size)
    for _ in range(2):
        x = [row for batch in data for row in batch["x"]]
        assert sorted(x) == list(range(rows))
    batch = next(iter(data))
    np.testing.assert_array_equal(batch["y"][0], batch["x"] * 10)


def test_shuffling_is_reproducible_and_differs_from_round_to_round():
    def orders():
        data = RowDataset(np.arange(50)).shuffle(7).batch(50)
        return [next(iter(data)).tolist() for _ in range(2)]

    assert orders() == orders()
    assert orders()[0] != orders()[1]


def test_without_a_batch_size_an_element_is_a_row():
    data = RowDataset((np.eye(3), np.arange(3)))
    assert len(data) == 3
    row, number = next(iter(data))
    assert row.shape == (3,)
    assert number == 0


def test_arrays_of_other_lengths_are_refused():
    with pytest.raises(InputError, match=r"Expected arrays with as many rows.*Received: .*3.*4"):
        RowDataset((np.zeros(3), np.zeros(4)))


@pytest.mark.parametrize("nothing", [(), np.float32(3.0)])
def test_what_has_no_rows_is_refused(nothing):
    with pytest.raises(InputError, match=r"Expected arrays with as many rows.*Received: "):
        RowDataset(nothing)


def test_a_batch_has_a_row_at_least():
    with pytest.raises(ValueError, match=r"Expected batch_size to be positive.*Received: batch_si"):
        RowDataset(np.zeros(3)).batch(0)
