"""The suites' cases with state that the replicas divide. All of them: `make sharded`."""

import pytest

from tests.conformance.items import parameters, require


@pytest.mark.parametrize(("suite", "backend", "key"), parameters("tests.sharded"))
def test_the_same_with_sharded_state(suite, backend, key, runs):
    require(runs.result(suite, backend, key))
