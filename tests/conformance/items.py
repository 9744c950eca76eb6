"""The cases of a suite as pytest's parameters, and a case's result as pytest's verdict."""

import pytest

from tests.conformance import registry
from tests.conformance.runner import GRACE_SECONDS, STARTUP_SECONDS, Result

# `make test` and `make test-everything` share the items of these.
SHARED = (registry.CONFORMANCE, "tests.facade", "tests.in_scope")


def parameters(suite: str = registry.CONFORMANCE) -> list:
    return [
        pytest.param(
            *(suite, backend, item.key),
            id=f"{backend}-{item.key}",
            marks=marks(item.case, slow=registry.is_slow(item.case, backend, suite)),
        )
        for backend in registry.BACKENDS
        for item in registry.items(backend, suite)
        if suite not in SHARED or registry.is_in_this_run(item)
    ]


def marks(case: registry.Case, *, slow: bool) -> list[pytest.MarkDecorator]:
    """Ends a test whose worker says nothing; the worker itself has the case's own limit."""
    limit = pytest.mark.timeout(STARTUP_SECONDS + case.seconds + 4 * GRACE_SECONDS)
    return [limit, pytest.mark.slow] if slow else [limit]


def require(result: Result):
    """Fails the running test with what the worker said, unless the case is as it should be."""
    if not result.good:
        pytest.fail(
            f"{result.status} after {result.seconds} s: {result.message}\n{result.traceback}",
            pytrace=False,
        )
