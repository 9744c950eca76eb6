"""Every case on every backend: what a strategy computes equals what one device computes.

Nothing is skipped: a missing backend fails, and a feature that a backend can't have is a case
that asserts the error a user gets.
"""

import pytest

from tests.conformance.items import parameters, require


@pytest.mark.parametrize(("backend", "conformance_key"), parameters())
def test_equals_one_device(backend, conformance_key, conformance_runs):
    require(conformance_runs.result(backend, conformance_key))
