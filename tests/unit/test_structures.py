"""Nested structures, by their laws."""

import collections

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kerasdist.core import structures

Point = collections.namedtuple("Point", ["x", "y"])

LEAVES = st.one_of(st.none(), st.integers(), st.text(max_size=3))
NESTS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=2), inner, max_size=3),
        st.dictionaries(st.text(max_size=2), inner, max_size=3).map(collections.OrderedDict),
        st.builds(Point, inner, inner),
    ),
    max_leaves=12,
)


@given(NESTS)
def test_packing_the_leaves_gives_the_structure(nest):
    assert structures.pack(nest, structures.flatten(nest)) == nest


@given(NESTS, st.integers(1, 4))
def test_transposing_equal_structures_merges_leaf_by_leaf(nest, replicas):
    copies = [
        structures.map_leaves(lambda leaf, r=replica: f"{r}{leaf!r}", nest)
        for replica in range(replicas)
    ]
    merged = structures.transpose(copies, "|".join)
    rows = zip(*map(structures.flatten, copies), strict=True)
    assert structures.flatten(merged) == ["|".join(row) for row in rows]
    assert types(merged) == types(copies[0])


@pytest.mark.parametrize(
    "different",
    [
        [(1, 2), [1, 2]],
        [(1, 2), (1,)],
        [{"a": 1}, {"b": 1}],
        [{"a": 1}, (1,)],
        [1, (1,)],
        [{"a": [1]}, {"a": [1, 2]}],
        [Point(1, 2), (1, 2)],
    ],
)
def test_structures_that_differ_are_refused(different):
    with pytest.raises(ValueError, match=r"Expected the same structure.*Received: "):
        structures.transpose(different, list)


def test_dicts_are_read_by_key_not_by_place():
    merged = structures.transpose([{"a": 1, "b": 2}, {"b": 20, "a": 10}], list)
    assert structures.flatten(merged) == [1, 10, 2, 20]


def types(nest) -> list[type]:
    """The types of all containers, outermost first."""
    if isinstance(nest, dict):
        return [type(nest), *(one for value in nest.values() for one in types(value))]
    if isinstance(nest, list | tuple):
        return [type(nest), *(one for value in nest for one in types(value))]
    return []
