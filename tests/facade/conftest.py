"""The suite's items run in one fresh process a backend, as the exactness suite's do."""

import pytest

from tests.conformance.runner import Runs


@pytest.fixture(scope="session")
def facade_runs(request):
    runs = Runs(request.session.items, __package__, "facade_key")
    yield runs
    runs.close()
