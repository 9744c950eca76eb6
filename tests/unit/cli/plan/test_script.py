"""Scripts of users up to their first training step; see scripts_of_users.py."""

import json

import pytest

from tests.fresh import run_forked


@pytest.fixture(scope="module")
def found():
    output = run_forked("from tests.unit.cli.plan.scripts_of_users import main; main()", "jax")
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return {line.pop("name"): line for line in lines}


@pytest.mark.parametrize(
    ("name", "examples", "in_all", "strategy"),
    [
        ("plain", 10, 30, None),
        ("train_on_batch", 30, None, None),
        ("weights", 6, 30, None),
        ("steps_per_execution", 5, 30, None),
        ("validation", 6, 22, None),
        ("TPUStrategy", 15, 30, "TPUStrategy"),
        ("auto", 2, None, "MirroredStrategy"),  # a generator
        ("overridden", 7, 30, "MirroredStrategy"),
        ("function", 8, None, None),
        ("larger than this machine", 10, 30, "MirroredStrategy"),
    ],
)
def test_model_and_batch_of_the_first_step(found, name, examples, in_all, strategy):
    expected = {"examples": examples, "built": True, "by": strategy, "in all": in_all}
    assert found[name] == expected


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("values of large weights", "the last of variable='sequential"),
        ("another shape", "The shape of the target variable and the shape of the target value"),
        ("without a step", "the script ended before either was called"),
        ("within a machine", "Received: sharding=Sharding(state='full', min_size=65536, within="),
        ("exit", "ended with exit code 3"),
        ("wrong", "of_user:wrong returned Sequential. Return (model, (x, y))"),
        ("missing", "Received: script='nowhere.py', which is neither"),
    ],
)
def test_no_step_is_an_error(found, name, words):
    assert words in found[name]["error"]
