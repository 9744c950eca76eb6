"""`kerasdist plan` compiles a real script for TPUs, on a machine with none."""

import json

import pytest

from tests.ahead_of_time.processes import run_with_compilers

SCRIPT = """
import os
os.environ["KERAS_BACKEND"] = "torch"   # as many scripts do; a plan is made on JAX in any case

import sys
import keras
import kerasdist as kd

strategy = kd.MirroredStrategy(["gpu:0", "gpu:1"])
assert strategy.num_replicas_in_sync == 4
assert sys.argv[1:] == ["--epochs", "3"]
print("printed by the script")

class Never(keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        raise AssertionError("a plan trains nothing")

with strategy.scope():
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(256, "relu"),
                              keras.layers.Dropout(0.1), keras.layers.Dense(8)])
    model.compile(keras.optimizers.Adam(), "mse")
try:
    model.fit(keras.ops.zeros((512, 64)), keras.ops.zeros((512, 8)), batch_size=128,
              callbacks=[Never()])
except Exception:
    pass
raise AssertionError("the script ran on")
"""
PARAMETERS = 64 * 256 + 256 + 256 * 8 + 8


def plan_of(script, folder, *options):
    path = folder / "train.py"
    path.write_text(script)
    command = ("-m", "kerasdist", "plan", path, "--json", "--no-largest-batch", *options)
    return json.loads(run_with_compilers(*command, "--", "--epochs", "3"))


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plan")
    plot = folder / "scaling.png"
    found = plan_of(SCRIPT, folder, "--devices", "v5e:2x2", "--plot", plot)
    assert plot.stat().st_size > 1000
    return found


@pytest.mark.timeout(300)
def test_a_step_is_described(plan):
    assert plan["target"] == {"name": "v5e:2x2", "chip": "TPU v5e", "devices": 4}
    assert (plan["backend"], plan["strategy"]) == ("jax", "MirroredStrategy")
    assert (plan["global_batch"], plan["batch_per_device"]) == (128, 32)
    assert plan["parameters"] == PARAMETERS
    assert plan["fits"] is True
    memory = plan["memory"]["by_kind"]
    # Weights and the state of Dropout's seed; Adam's two moments, its step and learning rate.
    assert memory["parameters"] == 4 * PARAMETERS + 8
    assert memory["optimizer"] == 4 * (2 * PARAMETERS + 2)
    assert memory["input"] == 2 * 4 * 32 * (64 + 8)
    # Forward, and two products backward, but none for the gradient of the input.
    assert plan["flops"] == {"float32": 2 * 32 * (2 * 64 * 256 + 3 * 256 * 8)}
    assert plan["memory_traffic"] > 4 * PARAMETERS


def test_the_sum_is_that_of_the_gradients_and_the_loss(plan):
    kinds = {each["kind"] for each in plan["collectives"]}
    size = sum(each["bytes"] for each in plan["collectives"])
    assert kinds == {"all-reduce"}
    assert 4 * PARAMETERS <= size <= 4 * PARAMETERS + 64


def test_the_scaling_begins_with_one_device(plan):
    devices = [each["devices"] for each in plan["scaling"]]
    assert devices == [1, 4, 8, 64, 512, 4096]
    assert plan["scaling"][0]["efficiency"] == 1
    assert all(0 < each["efficiency"] <= 1 for each in plan["scaling"])
    assert plan["step"] == plan["scaling"][1]


@pytest.mark.timeout(300)
def test_full_sharding_on_gpus_is_planned_for_pytorch_too(tmp_path):
    script = SCRIPT.replace("== 4", "== 8").replace("256", "2048")
    plan = plan_of(script, tmp_path, "--devices", "8xh100", "--sharding", "full")
    first = 64 * 2048  # of at least 65,536 elements; the others stay whole
    whole = 2048 + 2048 * 8 + 8
    groups = plan["groups"]
    assert (groups["sizes"], groups["whole"]) == ([4 * first], 4 * whole)
    _, _, *how = plan["layout"]["variables"][0]
    assert how == ["(None, replica)", "largest dimension that 8 divides", 4 * first // 8]
    # Weights, gradients and Adam's moments, and some numbers.
    assert 0 <= groups["held"] - 4 * 4 * (first // 8 + whole) <= 64
    assert plan["step"]["own"] == plan["torch_step"]["own"]
    # It is gathered once, as the backward pass still has it, and nothing hides that.
    assert plan["torch_step"]["exposed"] == plan["torch_step"]["network"] > 0


@pytest.mark.timeout(300)
def test_what_the_host_would_hold_is_planned(tmp_path):
    """As if the script's strategy had it; smaller variables stay."""
    script = SCRIPT.replace("256", "2048")
    plan = plan_of(script, tmp_path, "--devices", "v5e:2x2", "--offload", "optimizer")
    moments = 2 * 4 * 64 * 2048
    small = 2 * 4 * (2048 + 2048 * 8 + 8)
    assert plan["host_bytes"] == moments
    assert 0 <= plan["memory"]["by_kind"]["optimizer"] - small <= 64
    assert plan["step"]["host"] > 0


LARGER = """
import resource
import sys
from pathlib import Path

pages = int(Path("/proc/self/statm").read_text().split()[0])
most = pages * resource.getpagesize() + 4 * 10**9
resource.setrlimit(resource.RLIMIT_AS, (most, most))

import keras
import kerasdist as kd

with kd.MirroredStrategy(sharding="full").scope():
    layers = [keras.layers.Dense(2**15, "gelu", use_bias=False) for _ in range(5)]
    model = keras.Sequential([keras.Input((2**15,)), *layers])
    model.compile(keras.optimizers.Adam(), "mse")
x = keras.ops.zeros((8, 2**15))
model.fit(x, x, batch_size=8)
"""


@pytest.mark.timeout(300)
def test_a_model_larger_than_this_machine_is_planned(tmp_path):
    """Its process may take 4 GB more: 21.5 GB of weights, and as much twice for Adam."""
    memory = plan_of(LARGER, tmp_path, "--devices", "8xh100")["memory"]["by_kind"]
    weights = 5 * 4 * 2**30
    assert memory["parameters"] == weights / 8
    assert 0 < memory["optimizer"] - 2 * weights / 8 < 64
