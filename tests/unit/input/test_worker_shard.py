"""Which rows of a global batch a worker has, by arithmetic alone."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kerasdist.input.sharding import OwnNumbers, WorkerShard, bounds_of_replicas, bounds_of_workers

WORKERS = st.integers(1, 5)
EACH = st.integers(1, 4)


@given(st.integers(0, 60), WORKERS, EACH)
def test_a_workers_rows_are_those_of_its_replicas(total, workers, each):
    bounds = bounds_of_workers(total, workers, each)
    replicas = bounds_of_replicas(total, workers * each)
    assert len(bounds) == workers
    for rank, (begin, end) in enumerate(bounds):
        own = replicas[rank * each : (rank + 1) * each]
        assert (begin, end) == (own[0][0], own[-1][1])
        # Cut by itself, the worker's part gives its replicas the same rows.
        assert [(begin + a, begin + b) for a, b in bounds_of_replicas(end - begin, each)] == list(
            own
        )


@given(st.integers(1, 60), WORKERS, EACH)
def test_workers_choose_all_numbers_once(total, workers, each):
    replicas = workers * each
    numbers = np.random.default_rng(total).permutation(total)
    chosen = [
        OwnNumbers(replicas, range(rank * each, (rank + 1) * each)) for rank in range(workers)
    ]
    parts = [own(numbers) for own in chosen]
    batches = [own.batch(part, total) for own, part in zip(chosen, parts, strict=True)]
    if total < replicas:  # all of them compute such a batch
        assert all(part is numbers for part in parts)
        assert all(batch is numbers for batch in batches)
        return
    np.testing.assert_array_equal(np.concatenate(parts), numbers)
    for rank, batch in enumerate(batches):
        assert isinstance(batch, WorkerShard)
        assert (batch.rank, batch.size, batch.total) == (rank, len(parts[rank]), total)
        assert batch.sizes == tuple(map(len, parts))
