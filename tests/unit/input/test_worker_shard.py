"""Which rows of a global batch a worker has, by arithmetic alone."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kerasdist.input.sharding import OwnNumbers, WorkerShard


@given(st.integers(1, 60), st.integers(1, 20))
def test_workers_choose_all_numbers_once(total, workers):
    numbers = np.random.default_rng(total).permutation(total)
    chosen = [OwnNumbers(workers, rank) for rank in range(workers)]
    parts = [own(numbers) for own in chosen]
    batches = [own.batch(part, total) for own, part in zip(chosen, parts, strict=True)]
    if total < workers:  # all of them compute such a batch
        assert all(part is numbers for part in parts)
        assert all(batch is numbers for batch in batches)
        return
    np.testing.assert_array_equal(np.concatenate(parts), numbers)
    for rank, batch in enumerate(batches):
        assert isinstance(batch, WorkerShard)
        assert (batch.rank, batch.size, batch.total) == (rank, len(parts[rank]), total)
        assert batch.sizes == tuple(map(len, parts))
        assert batch.least == min(batch.sizes)
