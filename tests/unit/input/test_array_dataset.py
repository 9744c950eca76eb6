"""Arrays as a dataset of rows; the facade's case `datasets.rows_of_arrays` shuffles them."""

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


@pytest.mark.parametrize("wrong", [(np.zeros(3), np.zeros(4)), (), np.float32(3.0)])
def test_what_has_no_rows_or_unequal_numbers_is_refused(wrong):
    with pytest.raises(InputError, match=r"Expected arrays with as many rows.*Received: "):
        RowDataset(wrong)


def test_a_batch_has_a_row_at_least():
    with pytest.raises(ValueError, match=r"Expected batch_size to be positive.*Received: batch_si"):
        RowDataset(np.zeros(3)).batch(0)
