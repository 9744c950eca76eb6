"""Every case on every backend: custom loops mean what tf.distribute's mean.

Nothing is skipped: a missing backend fails, and a feature that a backend can't have is a case
that asserts the error a user gets.
"""

import pytest

from tests.conformance import registry
from tests.conformance.runner import GRACE_SECONDS, STARTUP_SECONDS

SUITE = "tests.facade"

ITEMS = [
    pytest.param(
        backend,
        item.key,
        id=f"{backend}-{item.key}",
        # The worker has the case's own limit; this one is for a worker that says nothing.
        marks=pytest.mark.timeout(STARTUP_SECONDS + item.case.seconds + 2 * GRACE_SECONDS),
    )
    for backend in registry.BACKENDS
    for item in registry.items(backend, SUITE)
]


@pytest.mark.parametrize(("backend", "facade_key"), ITEMS)
def test_means_what_tf_distribute_means(backend, facade_key, facade_runs):
    result = facade_runs.result(backend, facade_key)
    if not result.good:
        pytest.fail(
            f"{result.status} after {result.seconds} s: {result.message}\n{result.traceback}",
            pytrace=False,
        )
