"""The suites' cases with state that the replicas divide. All of them: `make sharded`."""

import pytest

from tests.conformance.items import parameters, require


@pytest.mark.parametrize(("backend", "sharded_key"), parameters("tests.sharded"))
def test_the_same_with_sharded_state(backend, sharded_key, sharded_runs):
    require(sharded_runs.result(backend, sharded_key))
