"""Global mean and variance, on replicas simulated with NumPy, replicas without example included."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kerasdist.input.sharding import bounds_of_replicas
from kerasdist.training import batch_norm

# Keras's divide_no_nan on NumPy divides first and selects after.
pytestmark = pytest.mark.filterwarnings(
    "ignore:(divide by zero|invalid value) encountered in divide:RuntimeWarning"
)

# As many replicas as are simulated have their numbers gathered, or summed as in a large job.
SIZES = (1, batch_norm.MOST_GATHERED + 1)
SECONDS = 20


def moments(inputs, mask, replicas, job) -> list[Any]:
    """Mean and variance as each replica has them, in a thread of its own."""
    slots: list[Any] = [None] * replicas
    barrier = threading.Barrier(replicas)

    def of_one(rank):
        class Collectives:
            own_moments = None

            def _exchange(self, value):
                slots[rank] = value
                barrier.wait(SECONDS)
                values = list(slots)
                barrier.wait(SECONDS)
                return values

            def all_sum(self, tensors):
                return [sum(parts) for parts in zip(*self._exchange(tensors), strict=True)]

            def all_stack(self, tensor):
                return np.stack(self._exchange(tensor))

        collectives: Any = Collectives()
        rows = slice(*bounds_of_replicas(len(inputs), replicas)[rank])
        axes = range(inputs.ndim - 1)
        of_rows = None if mask is None else mask[rows]
        return batch_norm.global_moments(collectives, job, inputs[rows], [*axes], of_rows)

    with ThreadPoolExecutor(replicas) as pool:
        return list(pool.map(of_one, range(replicas)))


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    *(st.integers(1, 11), st.integers(1, 5), st.integers(0, 2**32 - 1)),
    *(st.booleans(), st.sampled_from(SIZES)),
)
def test_every_replica_gets_the_moments_of_the_whole_batch(total, replicas, seed, masked, job):
    rng = np.random.default_rng(seed)
    inputs = rng.normal(3.0, 2.0, size=(total, 4, 3)).astype("float32")
    mask = rng.uniform(size=(total, 4)) < 0.6 if masked else None
    kept = inputs.reshape(-1, 3) if mask is None else inputs[mask]
    # With a mask Keras adds its epsilon, 1e-7, to the count.
    divisor = max(len(kept) + (1e-7 if masked else 0), 1e-7)
    mean = kept.sum(0) / divisor
    variance = np.square(kept - mean).sum(0) / divisor
    for found_mean, found_variance in moments(inputs, mask, replicas, job):
        np.testing.assert_allclose(found_mean, mean, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(found_variance, variance, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("job", SIZES)
def test_no_digits_are_lost_where_the_mean_is_large(job):
    # A sum of squares in float32 would give a variance of 0 or worse here.
    inputs = (np.arange(8, dtype="float32") + 10_000)[:, None]
    for mean, variance in moments(inputs, None, 3, job):
        assert float(mean[0]) == pytest.approx(10_003.5)
        assert float(variance[0]) == pytest.approx(5.25, rel=1e-5)
