"""Scopes, without a framework; the rest is in tests/facade."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from kerasdist.api import scopes
from kerasdist.api.strategy import Strategy


def test_a_scope_ends_with_an_error_inside():
    with pytest.raises(KeyError), Strategy(None).scope():
        raise KeyError
    assert not scopes.has_strategy()


def test_a_scope_is_seen_by_its_own_thread_alone():
    with Strategy(None).scope(), ThreadPoolExecutor(1) as pool:
        assert not pool.submit(scopes.has_strategy).result()
