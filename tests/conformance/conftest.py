"""Items of a backend run in one fresh process each; the backends run beside each other."""

import pytest

from tests.conformance import registry
from tests.conformance.runner import Runs


@pytest.fixture(scope="session")
def conformance_runs(request):
    runs = Runs(request.session.items, registry.CONFORMANCE, "conformance_key")
    yield runs
    runs.close()
