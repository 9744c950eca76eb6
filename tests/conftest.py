"""All suites share what they compile, print what matters, and run cases in fresh processes."""

import pytest

from tests.conformance.runner import Runs
from tests.environment import of_all

of_all()


@pytest.fixture(scope="session")
def runs(request):
    """The results of the suites' cases: of each suite in one process a backend, side by side."""
    opened = Runs(request.session.items)
    yield opened
    opened.close()
