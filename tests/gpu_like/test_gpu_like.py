"""The suites' cases on replicas that behave as on accelerators. All of them: `make gpu-like`."""

import pytest

from tests.conformance.items import parameters, require


@pytest.mark.parametrize(("suite", "backend", "key"), parameters("tests.gpu_like"))
def test_the_same_on_replicas_like_gpus(suite, backend, key, runs):
    require(runs.result(suite, backend, key))
