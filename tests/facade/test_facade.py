"""Every case on every backend: custom loops mean what tf.distribute's mean."""

import pytest

from tests.conformance.items import parameters, require


@pytest.mark.parametrize(("suite", "backend", "key"), parameters("tests.facade"))
def test_means_what_tf_distribute_means(suite, backend, key, runs):
    require(runs.result(suite, backend, key))
