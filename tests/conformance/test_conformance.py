"""Every case on every backend: what a strategy computes equals what one device computes.

No test is skipped: a missing backend fails, and a feature that a backend can't have is a case
that asserts the error a user gets.
"""

import pytest

from tests.conformance.items import parameters, require


@pytest.mark.parametrize(("suite", "backend", "key"), parameters())
def test_equals_one_device(suite, backend, key, runs):
    require(runs.result(suite, backend, key))
