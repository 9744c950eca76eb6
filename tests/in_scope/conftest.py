"""The cases run in one fresh process per backend."""

import pytest

from tests.conformance.runner import Runs


@pytest.fixture(scope="session")
def in_scope_runs(request):
    runs = Runs(request.session.items, __package__, "in_scope_key")
    yield runs
    runs.close()
