"""Distributed values, without a framework."""

import numpy as np

from kerasdist.api.values import Mirrored, PerReplica, component, per_replica


def test_components_may_be_fetched_late():
    fetched = []

    class Late(list):
        def __iter__(self):
            fetched.append(len(self))
            return super().__iter__()

    source = Late([1, 2])
    value = PerReplica(source)
    assert value.source is source
    assert not fetched
    assert value.values == (1, 2)
    assert fetched == [2]


def test_a_component_is_taken_of_every_value_in_a_nest():
    nest = {"a": PerReplica((1, 2)), "b": [(Mirrored((3, 3)), "text")], "c": None}
    assert component(nest, 1) == {"a": 2, "b": [(3, "text")], "c": None}


def test_structures_become_values_at_their_leaves():
    array = np.zeros(2)
    merged = per_replica([{"x": 1.5, "same": array}, {"x": 2.5, "same": array}])
    assert merged["x"].values == (1.5, 2.5)
    assert isinstance(merged["x"], PerReplica)
    assert merged["same"] is array


def test_taking_components_undoes_the_merge():
    replicas = [{"x": [1.5, "a"]}, {"x": [2.5, "b"]}, {"x": [3.5, "c"]}]
    merged = per_replica(replicas)
    assert [component(merged, index) for index in range(3)] == replicas
