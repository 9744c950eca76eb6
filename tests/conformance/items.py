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
            marks=time_limit(item.case),
        )
        for backend in registry.BACKENDS
        for item in registry.items(backend, suite)
    ]


def time_limit(case: registry.Case) -> pytest.MarkDecorator:
    """Ends a test whose worker says nothing; the worker itself has the case's own limit."""
    return pytest.mark.timeout(STARTUP_SECONDS + case.seconds + 4 * GRACE_SECONDS)


def require(result: Result):
    """Fails the running test with what the worker said, unless the case is as it should be."""
    if not result.good:
        pytest.fail(
            f"{result.status} after {result.seconds} s: {result.message}\n{result.traceback}",
            pytrace=False,
        )
