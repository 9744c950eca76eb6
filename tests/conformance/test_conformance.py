"""Every case on every backend: what a strategy computes equals what one device computes.

Nothing is skipped: a missing backend fails, and a feature that a backend can't have is a case
that asserts the error a user gets.
"""

import pytest

from tests.conformance import registry
from tests.conformance.runner import GRACE_SECONDS, STARTUP_SECONDS

ITEMS = [
    pytest.param(
        backend,
        item.key,
        id=f"{backend}-{item.key}",
        # The worker has the case's own limit; this one is for a worker that says nothing.
        marks=pytest.mark.timeout(STARTUP_SECONDS + item.case.seconds + 2 * GRACE_SECONDS),
    )
    for backend in registry.BACKENDS
    for item in registry.items(backend)
]


@pytest.mark.parametrize(("backend", "conformance_key"), ITEMS)
def test_equals_one_device(backend, conformance_key, conformance_runs):
    result = conformance_runs.result(backend, conformance_key)
    if not result.good:
        pytest.fail(
            f"{result.status} after {result.seconds} s: {result.message}\n{result.traceback}",
            pytrace=False,
        )
