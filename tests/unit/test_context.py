"""Which strategy is in force, and whose code this is."""

import copy
import threading

import pytest

from kerasdist.api import scopes
from kerasdist.api.replica_context import ReplicaContext, global_batch
from kerasdist.api.strategy import Strategy
from kerasdist.core import context
from kerasdist.errors import ScopeError


@pytest.fixture
def strategy():
    return Strategy(None)


def test_outside_of_every_scope_the_default_strategy_has_one_replica():
    assert not scopes.has_strategy()
    assert scopes.get_strategy().num_replicas_in_sync == 1
    assert not scopes.in_cross_replica_context()
    assert scopes.get_replica_context().replica_id_in_sync_group == 0


def test_inside_a_scope_the_code_is_for_all_replicas(strategy):
    with strategy.scope() as entered:
        assert entered is strategy
        assert scopes.has_strategy()
        assert scopes.get_strategy() is strategy
        assert scopes.in_cross_replica_context()
        assert scopes.get_replica_context() is None
    assert not scopes.has_strategy()


def test_a_scope_may_be_entered_again(strategy):
    with strategy.scope(), strategy.scope():
        assert scopes.get_strategy() is strategy


def test_another_strategy_inside_a_scope_is_refused_and_the_first_stays(strategy):
    with strategy.scope():
        with pytest.raises(ScopeError, match="one strategy at a time"), Strategy(None).scope():
            pytest.fail("the second scope opened")
        assert scopes.get_strategy() is strategy


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


def test_in_a_replica_the_strategy_and_the_replica_are_known(strategy):
    replica = ReplicaContext(strategy, 1, 2)
    with context.replica_scope(replica):
        assert scopes.get_replica_context() is replica
        assert scopes.get_strategy() is strategy
        assert not scopes.in_cross_replica_context()
        with pytest.raises(ScopeError, match="cross-replica code"), strategy.scope():
            pytest.fail("a scope opened in a replica")


def test_cross_replica_code_called_from_a_replica_knows_it(strategy):
    with context.replica_scope(ReplicaContext(strategy, 1, 2)), context.replica_scope(None):
        assert scopes.in_cross_replica_context()
        assert scopes.get_strategy() is strategy


def test_a_strategy_is_shared_by_deep_copies_and_never_copied(strategy):
    assert copy.deepcopy({"strategy": strategy})["strategy"] is strategy
    with pytest.raises(RuntimeError, match="Received: "):
        copy.copy(strategy)


def test_the_global_batch_of_one_device_is_the_tensor_itself():
    tensor = object()
    assert global_batch(tensor) is tensor
