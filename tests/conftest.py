"""All suites share what they compile, print what matters, and run cases in fresh processes.

And what `make test` leaves to `make test-slow` is marked here, but for suites' cases, of which
`tests.conformance.registry` and `tests.multiprocess.layouts` say it.
"""

import pytest

from tests.conformance.registry import BACKENDS, CHEAPEST
from tests.conformance.runner import Runs
from tests.environment import of_all

of_all()

# These tests start many processes or take long; a shorter test holds each of their promises.
SLOW = (
    "accelerators/test_tensorflow.py",
    "accelerators/test_torch_waits.py",
    "ahead_of_time/test_golden.py",
    "examples/test_examples.py::test_a_port",
    "examples/test_examples.py::test_an_example_by_itself",
    "examples/test_trackers.py",
    "integrations/ray",
    "multiprocess/test_elastic.py::test_the_numbers",
    "multiprocess/test_memory.py::test_a_worker",
    "multiprocess/test_sharded_backups.py",
    "unit/backends/test_jax_short_steps.py",
    "versions/test_keras_ddp.py",
    "versions/test_nightly_keras.py",
)
# Where tests, but for cases on several workers, run on the cheapest backend alone.
_CHEAPEST_ALONE = ("in_scope/", "multiprocess/", "versions/test_gone.py")


def is_slow(item) -> bool:
    where = item.nodeid.removeprefix("tests/")
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    names = {one for one in parameters.values() if isinstance(one, str)}
    others = names & {*BACKENDS} - {CHEAPEST}
    is_chosen = "group_case" in parameters or not where.startswith(_CHEAPEST_ALONE)
    return where.startswith(SLOW) or (bool(others) and not is_chosen)


@pytest.hookimpl(tryfirst=True)  # before -m is looked at
def pytest_collection_modifyitems(items):
    for item in filter(is_slow, items):
        item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def runs(request):
    """The results of the suites' cases: of each suite in one process a backend, side by side."""
    opened = Runs(request.session.items)
    yield opened
    opened.close()
