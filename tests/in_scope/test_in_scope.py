"""The suites' cases, which build and act in the scope. All of them: ``KERASDIST_IN_SCOPE=all``."""

import pytest

from tests.conformance.items import parameters, require


@pytest.mark.parametrize(("suite", "backend", "key"), parameters("tests.in_scope"))
def test_the_same_in_the_scope(suite, backend, key, runs):
    require(runs.result(suite, backend, key))
