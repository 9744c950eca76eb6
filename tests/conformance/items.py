"""The cases of a suite as pytest's parameters, and a case's result as pytest's verdict."""

import pytest

from tests.conformance import registry
from tests.conformance.runner import GRACE_SECONDS, STARTUP_SECONDS, Result


def parameters(suite: str = registry.CONFORMANCE) -> list:
    """Each case of a suite on each backend and number of replicas: the backend, the item's key."""
    return [
        pytest.param(
            backend,
            item.key,
            id=f"{backend}-{item.key}",
            # The worker has the case's own limit; this one is for a worker that says nothing.
            marks=pytest.mark.timeout(STARTUP_SECONDS + item.case.seconds + 2 * GRACE_SECONDS),
        )
        for backend in registry.BACKENDS
        for item in registry.items(backend, suite)
    ]


def require(result: Result):
    """Fails the running test with what the worker said, unless the case is as it should be."""
    if not result.good:
        pytest.fail(
            f"{result.status} after {result.seconds} s: {result.message}\n{result.traceback}",
            pytrace=False,
        )
