"""Scopes, and the default strategy, without a framework; the rest is in tests/facade."""

import threading

import numpy as np
import pytest

from kerasdist.api import scopes
from kerasdist.api.options import CommunicationOptions
from kerasdist.api.replica_context import ReplicaContext, checked_axis, global_batch
from kerasdist.api.strategy import Strategy
from kerasdist.api.values import PerReplica
from kerasdist.backends.base.single_replica import SoleRunner
from kerasdist.core import context


@pytest.fixture
def strategy():
    return Strategy(None)


def test_a_scope_ends_with_an_error_inside(strategy):
    with pytest.raises(KeyError), strategy.scope():
        raise KeyError
    assert not scopes.has_strategy()


def test_a_scope_is_seen_by_its_own_thread_alone(strategy):
    seen = []
    with strategy.scope():
        thread = threading.Thread(target=lambda: seen.append(scopes.has_strategy()))
        thread.start()
        thread.join()
    assert seen == [False]


def test_cross_replica_code_called_from_a_replica_knows_it(strategy):
    with context.replica_scope(ReplicaContext(strategy, 1, 2)), context.replica_scope(None):
        assert scopes.in_cross_replica_context()
        assert scopes.get_strategy() is strategy


def test_the_global_batch_of_one_device_is_the_tensor_itself():
    tensor = object()
    assert global_batch(tensor) is tensor


def test_axes_are_counted_from_both_ends():
    assert [checked_axis(np.zeros((2, 3)), axis) for axis in (-2, -1, 0, 1)] == [0, 1, 0, 1]


def test_extended(strategy):
    extended = strategy.extended
    assert extended.worker_devices == extended.parameter_devices == ()
    pairs = [(1.0, None), (PerReplica((2.0,)), None)]
    assert extended.batch_reduce_to("MEAN", pairs, CommunicationOptions()) == [1.0, 2.0]
    assert extended.broadcast_to(3.0, None) == 3.0
    assert extended.update([1], lambda v, x: [*v, x], args=(2,)) == [1, 2]
    assert extended.update([1], lambda v: v, group=False) == [[1]]
    assert extended.call_for_each_replica(lambda x: x, args=[4]) == 4
    with extended.colocate_vars_with(None):
        assert scopes.in_cross_replica_context()


def test_the_runner_computes_in_its_placement():
    entered = []

    class Placement:
        def __enter__(self):
            entered.append(True)

        def __exit__(self, *error):
            entered.append(False)

    runner = SoleRunner(Placement)
    runner.run(Strategy(None), lambda: entered.append("run"), (), {})
    assert entered == [True, "run", False]
