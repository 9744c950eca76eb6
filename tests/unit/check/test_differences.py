"""What of a step's differences counts, and what is left to rounding or to draws."""

import numpy as np
import pytest

from kerasdist.check.differences import Precision, StepResult, beyond, differences

PRECISION = Precision.of(["float32"])
RATE = 0.001


def step(gradient, change, **others):
    gradient, change = np.asarray(gradient, "float32"), np.asarray(change, "float32")
    return StepResult(
        **{
            "logs": {"loss": np.float32(1.0)},
            "gradients": {"kernel": gradient},
            "weights": {"kernel": change},
            "statistics": {},
            "sizes": {"kernel": 1.0},
            **others,
        }
    )


def decided(one, other):
    return [
        found.name
        for found in differences(one, other, PRECISION).deciding
        if found.is_more_than_rounding
    ]


def test_a_change_of_weights_counts_where_gradients_agree():
    one = step([1.0, 2.0], [-RATE, -RATE])
    other = step([1.0, 2.0], [-RATE * 1.41, -RATE * 1.41])
    assert decided(one, one) == []
    assert decided(one, other) == ["change of kernel"]


@pytest.mark.parametrize("tiny", [1e-9, 0.0])
def test_a_rounding_that_becomes_a_step_of_adam_does_not_count(tiny):
    one = step([1.0, tiny], [-RATE, -RATE])
    other = step([1.0, -1e-9], [-RATE, RATE])
    assert decided(one, other) == []


def test_a_weight_that_the_step_assigns_without_a_gradient_counts():
    one = step([1.0], [-RATE], gradients={})
    other = step([1.0], [-2 * RATE], gradients={})
    assert decided(one, other) == ["change of kernel"]


def test_weights_of_which_gradients_differ_are_left_to_the_gradients():
    one, other = step([1.0, 2.0], [-RATE, -RATE]), step([2.0, 4.0], [-RATE, RATE])
    assert decided(one, other) == ["kernel"]
    assert decided(one, step([1.0], [-RATE, RATE])) == ["kernel"]


def test_draws_that_differ_are_measured_by_several_steps():
    def loss(value):
        return step([1.0], [-RATE], logs={"loss": np.float32(value)})

    def found(value):
        return differences(loss(1.0), loss(value), PRECISION).deciding

    chance = [*found(1.001), *found(1.02)]  # the largest counts
    for value, far in ((1.1, False), (1.5, True)):
        left = beyond(found(value), chance, draws_differ=True)
        assert [one.name for one in left] == (["loss"] if far else [])
