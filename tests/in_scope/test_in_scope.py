"""The suites' cases, which build and act in the scope. All of them: ``KERASDIST_IN_SCOPE=all``."""

import pytest

from tests.conformance.items import parameters, require


@pytest.mark.parametrize(("backend", "in_scope_key"), parameters("tests.in_scope"))
def test_the_same_in_the_scope(backend, in_scope_key, in_scope_runs):
    require(in_scope_runs.result(backend, in_scope_key))
