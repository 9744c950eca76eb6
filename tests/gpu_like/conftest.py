"""The cases run in one fresh process per backend, those of both suites together."""

import pytest

from tests.conformance.runner import Runs


@pytest.fixture(scope="session")
def gpu_like_runs(request):
    runs = Runs(request.session.items, __package__, "gpu_like_key")
    yield runs
    runs.close()
