"""The cases run in one fresh process per backend, those of all suites together."""

import pytest

from tests.conformance.runner import Runs


@pytest.fixture(scope="session")
def sharded_runs(request):
    runs = Runs(request.session.items, __package__, "sharded_key")
    yield runs
    runs.close()
