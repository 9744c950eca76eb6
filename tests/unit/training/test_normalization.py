"""Global mean and variance, on replicas simulated with NumPy, replicas without example included."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kerasdist.training import batch_norm
from tests.unit import simulation

# Keras's divide_no_nan on NumPy divides first and selects after.
pytestmark = pytest.mark.filterwarnings(
    "ignore:(divide by zero|invalid value) encountered in divide:RuntimeWarning"
)

# As many replicas as are simulated have their numbers gathered, or summed as in a large job.
SIZES = (1, batch_norm.MOST_GATHERED + 1)
JOBS = st.sampled_from(SIZES)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(st.integers(1, 11), st.integers(1, 5), st.integers(0, 2**32 - 1), st.booleans(), JOBS)
def test_every_replica_gets_the_moments_of_the_whole_batch(total, replicas, seed, masked, job):
    rng = np.random.default_rng(seed)
    inputs = rng.normal(3.0, 2.0, size=(total, 4, 3)).astype("float32")
    mask = rng.uniform(size=(total, 4)) < 0.6 if masked else np.ones((total, 4), bool)
    kept = inputs[mask]
    # With a mask Keras adds its epsilon, 1e-7, to the count.
    divisor = max(len(kept) + (1e-7 if masked else 0), 1e-7)
    mean = kept.sum(0) / divisor
    variance = np.square(kept - mean).sum(0) / divisor

    def moments_of_one(replica, rows, row_mask):
        return batch_norm.global_moments(
            replica.collectives, job, rows, [0, 1], row_mask if masked else None
        )

    for found_mean, found_variance in simulation.run(moments_of_one, [inputs, mask], replicas):
        np.testing.assert_allclose(found_mean, mean, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(found_variance, variance, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("job", SIZES)
def test_no_digits_are_lost_where_the_mean_is_large(job):
    # A sum of squares in float32 would give a variance of 0 or worse here.
    inputs = (np.arange(8, dtype="float32") + 10_000)[:, None]

    def moments_of_one(replica, rows):
        return batch_norm.global_moments(replica.collectives, job, rows, [0], None)

    for mean, variance in simulation.run(moments_of_one, [inputs], 3):
        assert float(mean[0]) == pytest.approx(10_003.5)
        assert float(variance[0]) == pytest.approx(5.25, rel=1e-5)


@pytest.mark.parametrize("job", SIZES)
def test_the_trap_of_statistics_that_drift_apart(job):
    inputs = np.array([0, 0, 10, 10], "float32")[:, None]

    def moments_of_one(replica, rows):
        return batch_norm.global_moments(replica.collectives, job, rows, [0], None)

    for mean, variance in simulation.run(moments_of_one, [inputs], 2):
        assert float(mean[0]) == 5
        assert float(variance[0]) == 25
