"""How many rows one device tries of a batch; the suites divide batches of all sizes."""

from hypothesis import given
from hypothesis import strategies as st

from kerasdist.input import sharding

TOTALS = st.integers(0, 10_000)
REPLICAS = st.integers(1, 64)


@given(st.lists(st.integers(0, 500), min_size=1, max_size=64).filter(any))
def test_one_device_tries_at_most_a_few_times_what_a_replica_has(sizes):
    tried = sharding.spared(sizes)
    assert all(0 <= few <= all_ for few, all_ in zip(tried, sizes, strict=True))
    assert [few > 0 for few in tried] == [all_ > 0 for all_ in sizes]
    assert sum(tried) <= max(4 * max(sizes), len(sizes))


@given(TOTALS.filter(bool), REPLICAS)
def test_fewer_rows_are_divided_as_they_are_spared(total, replicas):
    tried = sharding.spared(sharding.piece_sizes(total, replicas))
    assert tried == sharding.piece_sizes(sum(tried), replicas)


def test_a_small_batch_is_tried_as_a_whole():
    assert sharding.spared((6, 6)) == (6, 6)
    assert sharding.spared((32, 32)) == (16, 16)
    assert sharding.spared((32,) * 64) == (2,) * 64
