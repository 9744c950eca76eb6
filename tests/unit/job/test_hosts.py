"""Which workers are on one machine (`kerasdist.Sharding.within`)."""

import pytest

from kerasdist.job.job import sizes_of_hosts


@pytest.mark.parametrize(
    ("workers", "sizes"),
    [
        ([("a", 0), ("a", 1), ("b", 0), ("b", 1)], [2, 2]),
        ([("a", None), ("a", None), ("b", None)], [2, 1]),  # numbers are not always known
        ([("copy", 0), ("copy", 1), ("copy", 0), ("copy", 1)], [2, 2]),  # machines of one name
        ([("copy", 0), ("copy", 0)], [1, 1]),
        ([("a", 0), ("b", 0), ("a", 1), ("b", 1)], [1, 1, 1, 1]),  # no neighbours
        ([("a", 0)], [1]),
    ],
)
def test_sizes_of_hosts(workers, sizes):
    assert sizes_of_hosts(workers) == sizes
