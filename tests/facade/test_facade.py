"""Every case on every backend: custom loops mean what tf.distribute's mean.

Nothing is skipped: a missing backend fails, and a feature that a backend can't have is a case
that asserts the error a user gets.
"""

import pytest

from tests.conformance.items import parameters, require


@pytest.mark.parametrize(("backend", "facade_key"), parameters("tests.facade"))
def test_means_what_tf_distribute_means(backend, facade_key, facade_runs):
    require(facade_runs.result(backend, facade_key))
