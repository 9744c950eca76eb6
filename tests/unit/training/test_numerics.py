"""The weighting of contract C1, on replicas simulated with NumPy.

The global loss in float32 differs from one device's by the order of the additions: 1e-5 relative.
"""

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kerasdist import keras_compat
from kerasdist.training import numerics
from tests.unit import simulation

# Keras's divide_no_nan on NumPy divides first and selects after.
pytestmark = pytest.mark.filterwarnings(
    "ignore:(divide by zero|invalid value) encountered in divide:RuntimeWarning"
)

REDUCTIONS = ["sum", "sum_over_batch_size", "mean", "mean_with_sample_weight"]
reduce_loss = keras.src.losses.loss.reduce_weighted_values


def weighted_mean(losses, total, replicas):
    """What the engine computes: the mean of the replicas' losses by their share of the batch."""
    sizes = [end - begin for begin, end in simulation.bounds_of_replicas(total, replicas)]
    return sum(float(loss) * n / total for loss, n in zip(losses, sizes, strict=True) if n)


@st.composite
def batches(draw):
    total, steps = draw(st.integers(1, 13)), draw(st.integers(1, 4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    values = rng.normal(size=(total, steps)).astype("float32")
    masked = draw(st.booleans())
    # Keras on NumPy cannot merge a mask of steps with weights of examples.
    weight = draw(st.sampled_from(["none", "step"] if masked else ["none", "example", "step"]))
    sample_weight = {
        "none": None,
        "example": rng.uniform(0, 2, size=(total, 1)).astype("float32"),
        "step": rng.uniform(0, 2, size=(total, steps)).astype("float32"),
    }[weight]
    mask = (rng.uniform(size=(total, steps)) < draw(st.sampled_from([0.0, 0.5, 1.0]))).astype(bool)
    return values, sample_weight, mask if masked else None


@settings(max_examples=150, deadline=None, derandomize=True)
@given(batches(), st.integers(1, 5), st.sampled_from(REDUCTIONS))
def test_the_weighted_mean_of_the_replicas_losses_is_the_loss_of_one_device(
    batch, replicas, reduction
):
    values, sample_weight, mask = batch
    expected = reduce_loss(values, sample_weight, mask, reduction, "float32")

    def loss_of_one(replica, rows):
        piece = slice(rows[0], rows[-1] + 1) if len(rows) else slice(0, 0)
        if not len(rows):
            # With no rows Keras returns the empty tensor instead of 0: backends keep that size
            # unknown, which NumPy cannot; so the divisor is exchanged, and the loss is nothing.
            if _exchanges(reduction, sample_weight, mask):
                replica.collectives.all_sum([np.float32(0)])
            return np.float32(0)
        return numerics.global_share_of_loss(
            reduce_loss,
            replica,
            values[piece],
            sample_weight=None if sample_weight is None else sample_weight[piece],
            mask=None if mask is None else mask[piece],
            reduction=reduction,
            dtype="float32",
        )

    losses = simulation.run(loss_of_one, [np.arange(len(values))], replicas)
    assert weighted_mean(losses, len(values), replicas) == pytest.approx(
        float(expected), rel=1e-5, abs=1e-5
    )


def _exchanges(reduction, sample_weight, mask):
    if reduction == "sum":
        return False
    if reduction == "mean_with_sample_weight":
        return sample_weight is not None or mask is not None
    return mask is not None


def test_a_scalar_is_taken_for_a_mean():
    scalar = np.float32(3.0)

    def loss_of_one(replica, rows):
        return numerics.global_share_of_loss(
            reduce_loss,
            replica,
            scalar,
            sample_weight=None,
            mask=None,
            reduction="sum",
            dtype="float32",
        )

    assert simulation.run(loss_of_one, [np.arange(3)], 2) == [3.0, 3.0]


def test_without_reduction_the_values_stay_as_they_are():
    def loss_of_one(replica, rows):
        return numerics.global_share_of_loss(
            reduce_loss,
            replica,
            rows,
            sample_weight=None,
            mask=None,
            reduction="none",
            dtype="float32",
        )

    first, second = simulation.run(loss_of_one, [np.arange(3, dtype="float32")], 2)
    assert first.tolist() == [0, 1]
    assert second.tolist() == [2]


@pytest.mark.parametrize("weight", [np.float32(0.0), np.float32(0.25)])
def test_a_gradient_counts_by_its_weight_and_not_at_all_without_example(weight):
    gradient = np.array([1.0, np.nan if weight == 0 else 2.0], "float32")
    expected = [0, 0] if weight == 0 else [0.25, 0.5]
    assert numerics.weighted(gradient, weight).tolist() == expected


def test_keras_still_merges_masks_and_weights_as_the_derivation_assumes():
    mask = np.array([[1, 0, 1]], bool)
    merged = keras_compat.apply_mask(
        None, mask, dtype="float32", reduction="mean_with_sample_weight"
    )
    assert np.asarray(merged).tolist() == [[1, 0, 1]]
