"""Every case on every backend: custom loops mean what tf.distribute's mean.

Nothing is skipped: a missing backend fails, and a feature that a backend can't have is a case
that asserts the error a user gets.
"""

import pytest

from tests.conformance.items import parameters, require


@pytest.mark.parametrize(("suite", "backend", "key"), parameters("tests.facade"))
def test_means_what_tf_distribute_means(suite, backend, key, runs):
    require(runs.result(suite, backend, key))
