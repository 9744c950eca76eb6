"""Every case on every backend: what a strategy computes equals what one device computes.

Nothing is skipped: a missing backend fails, and a feature that a backend can't have is a case
that asserts the error a user gets.
"""

import pytest

from tests.conformance import registry

ITEMS = [
    pytest.param(backend, item.key, id=f"{backend}-{item.key}")
    for backend in registry.BACKENDS
    for item in registry.items(backend)
]


@pytest.mark.parametrize(("backend", "key"), ITEMS)
def test_equals_one_device(backend, key, conformance_runs):
    result = conformance_runs.of(backend).result(key)
    if not result.good:
        pytest.fail(
            f"{result.status} after {result.seconds} s: {result.message}\n{result.traceback}",
            pytrace=False,
        )
