"""The suites' cases on replicas that behave as on accelerators. All of them: `make gpu-like`."""

import pytest

from tests.conformance.items import parameters, require


@pytest.mark.parametrize(("backend", "gpu_like_key"), parameters("tests.gpu_like"))
def test_the_same_on_replicas_like_gpus(backend, gpu_like_key, gpu_like_runs):
    require(gpu_like_runs.result(backend, gpu_like_key))
