"""What is planned of PyTorch's workers with sharded weights: groups and bytes (ADR 62)."""

import json

import keras
import pytest

from kerasdist.cli.plan import report
from kerasdist.cli.plan.groups import WeightGroups, weight_groups
from kerasdist.core.hardware import parse_target
from kerasdist.core.sharding import Sharding
from tests.unit.cli.plan.test_command import compilation, plan_of, shown

WIDTH = 64
LAYER = 4 * (WIDTH * WIDTH + WIDTH)


def model_of(layers):
    model = keras.Sequential([keras.Input((WIDTH,)), *map(keras.layers.Dense, [WIDTH] * layers)])
    model.compile(keras.optimizers.Adam(), "mse")
    model.optimizer.build(model.trainable_variables)
    return model


def sizes_of(model, *limit):
    return list(weight_groups(model, Sharding("full", 1), parse_target("4xh100"), *limit).sizes)


def test_small_layers_are_together_and_a_layer_is_never_divided():
    model = model_of(5)
    assert sizes_of(model) == [5 * LAYER]
    assert sizes_of(model, 2 * LAYER) == [2 * LAYER, 2 * LAYER, LAYER]
    assert sizes_of(model, 1) == [LAYER] * 5


def test_a_group_may_have_weights_of_several_types():
    layers = [keras.layers.Dense(WIDTH, dtype=one) for one in ("float32", "bfloat16", "bfloat16")]
    model = keras.Sequential([keras.Input((WIDTH,)), *layers])
    model.compile("sgd", "mse")
    assert sizes_of(model) == [2 * LAYER]


def test_a_step_gathers_twice_but_for_the_last_group_and_scatters_once():
    groups = WeightGroups([100, 300, 200], 7, 0)
    found = [(one.kind, one.bytes) for one in groups.collectives()]
    assert found == [
        *[("all-gather", size) for size in (100, 300, 200, 100, 300)],
        *[("reduce-scatter", size) for size in (100, 300, 200)],
        ("all-reduce", 7),
    ]
    assert groups.gathered == 500


def test_what_hides_a_group_is_the_work_of_the_one_before_it():
    hidden = [one.overlap for one in WeightGroups([100, 300], 0, 0).collectives()]
    # Gathers forward and backward, and sums; the last is of the flags which gradients there are.
    assert hidden == pytest.approx([0, 0.25 / 3, 0.75 / 3, 0, 0.25 / 3, 0])


def test_only_fully_sharded_models_on_several_gpus_have_groups():
    model, full = model_of(2), Sharding("full", 1)
    assert weight_groups(model, full, parse_target("8xh100")) is not None
    for sharding, target in (
        (full, "h100"),
        (full, "v5e:2x2"),
        (Sharding("optimizer", 1), "8xh100"),
        (None, "8xh100"),
    ):
        assert weight_groups(model, sharding, parse_target(target)) is None


def planned(groups):
    return plan_of(compilation(), sharding="full", groups=groups)


def test_it_is_printed_beside_xlas_plan():
    plan = planned(WeightGroups([10**9] * 4, 10**6, 2 * 10**9))
    assert (
        "On PyTorch workers gather the weights in 4 groups: 12 collectives, 11 GB. Each keeps 2 GB "
        "of variables and gradients, and at most 2 GB of gathered weights." in shown(plan)
    )
    facts = json.loads(report.as_json(plan))
    assert facts["groups"]["sizes"] == [10**9] * 4
    step = facts["torch_step"]
    assert step["own"] < step["total"] < step["own"] + step["network"]


def test_nothing_is_said_where_nothing_is_gathered():
    plan = planned(None)
    assert "PyTorch" not in shown(plan)
    assert json.loads(report.as_json(plan))["torch_step"] is None
