"""The suites' cases on replicas that behave as on accelerators. All of them: `make gpu-like`."""

import pytest

from tests.conformance import registry
from tests.conformance.runner import GRACE_SECONDS, STARTUP_SECONDS

SUITE = "tests.gpu_like"

ITEMS = [
    pytest.param(
        backend,
        item.key,
        id=f"{backend}-{item.key}",
        marks=pytest.mark.timeout(STARTUP_SECONDS + item.case.seconds + 2 * GRACE_SECONDS),
    )
    for backend in registry.BACKENDS
    for item in registry.items(backend, SUITE)
]


@pytest.mark.parametrize(("backend", "gpu_like_key"), ITEMS)
def test_the_same_on_replicas_like_gpus(backend, gpu_like_key, gpu_like_runs):
    result = gpu_like_runs.result(backend, gpu_like_key)
    if not result.good:
        pytest.fail(
            f"{result.status} after {result.seconds} s: {result.message}\n{result.traceback}",
            pytrace=False,
        )
