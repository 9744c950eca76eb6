"""The cases, by name, and what several of them need."""

import numpy as np

import kerasdist as kd

REPLICAS = 2
CASES = {}


def case(test):
    CASES[test.__name__] = test
    return test


def index():
    return kd.get_replica_context().replica_id_in_sync_group


def numbered(strategy, dtype="float32"):
    return strategy.distribute_values_from_function(
        lambda at: np.full((2,), at.replica_id_in_sync_group + 1, dtype)
    )


def components(strategy, value):
    return [np.asarray(one) for one in strategy.local_results(value)]
