"""The arithmetic of several devices for one replica."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kerasdist.core.partitions import Splits, check_partition, mesh_axes, prime_factors


@given(st.lists(st.integers(1, 12), min_size=1, max_size=4))
def test_every_way_to_cut_finds_its_axes(shards):
    factors = prime_factors(math.prod(shards))
    axes = mesh_axes(shards, factors)
    used = [axis for own in axes for axis in own]
    assert sorted(used) == list(range(len(factors)))  # each once, none left
    assert [math.prod(factors[axis] for axis in own) for own in axes] == shards


def test_the_first_rule_that_fits_counts():
    splits = Splits(2)
    splits.add({"dense/kernel": (1, 2)})
    splits.add({"kernel": (2, 1)})
    assert splits.shards_of("model/dense/kernel", (4, 4)) == (1, 2)
    assert splits.shards_of("model/other/kernel", (4, 4)) == (2, 1)
    assert splits.shards_of("model/dense/bias", (4,)) == (1,)
    with pytest.raises(ValueError, match="variable 'model/dense/kernel'"):
        splits.shards_of("model/dense/kernel", (4, 3))
    with pytest.raises(ValueError, match="regular expressions"):
        splits.add({"(": (1, 2)})
    check_partition((None, 4), (1, 2), 2)  # a size that is not known fits
