"""The suite's items run in one fresh process a backend, as the exactness suite's do."""

import pytest

from tests.conformance.runner import Runs
from tests.environment import everything

# In `make test-everything` alone: what `tf.distribute` itself gives, case by case.
collect_ignore = [] if everything() else ["test_side_by_side.py"]


@pytest.fixture(scope="session")
def facade_runs(request):
    runs = Runs(request.session.items, __package__, "facade_key")
    yield runs
    runs.close()
