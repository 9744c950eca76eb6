"""How many collectives XLA makes of a step of `fit` with BatchNormalization, on 4 CPU devices."""

import json

import pytest

from tests.environment import CPU_DEVICES, SLOWER_KERNELS, values
from tests.fresh import ROOT, run_fresh

PROBE = """
import collections, json
import kerasdist as kd
kd.config.set_logical_cpu_devices(4)
import keras, jax
from tests.ahead_of_time import programs
from tests.ahead_of_time.programs import L, Program, ahead_of_time, hlo

def network(layers):
    def build():
        block = [one for _ in range(layers) for one in (L.Dense(6), L.BatchNormalization())]
        return keras.Sequential([keras.Input((5,)), *block, L.Dense(programs.CLASSES)])
    return build

def masked():
    block = [L.Masking(), L.BatchNormalization(), L.Dense(4), L.BatchNormalization()]
    last = [L.GlobalAveragePooling1D(), L.Dense(programs.CLASSES)]
    return keras.Sequential([keras.Input((3, 5)), *block, *last])

found = {}
for name, build, batch in [
    ("2", network(2), 16), ("3", network(3), 16), ("uneven", network(3), 14), ("masked", masked, 16)
]:
    program = programs.program_of(Program(build, batch), jax.devices()[:4])
    text = ahead_of_time.compiled(program).text
    found[name] = collections.Counter(each.kind for each in hlo.collectives(text))
print(json.dumps(found))
"""

# Per layer an all-gather of the moments, and an all-reduce of two sums for their gradient; one
# all-reduce for the gradients of all weights, the loss and the metrics.
EXPECTED = {
    "2": {"all-gather": 2, "all-reduce": 3},
    "3": {"all-gather": 3, "all-reduce": 4},
    "uneven": {"all-gather": 3, "all-reduce": 4},
    # The gradient of the first layer, which reads the input, travels with those of all weights.
    "masked": {"all-gather": 2, "all-reduce": 2},
}


@pytest.fixture(scope="module")
def found():
    settings = values((*CPU_DEVICES, SLOWER_KERNELS))
    output = run_fresh(PROBE, KERAS_BACKEND="jax", PYTHONPATH=str(ROOT), seconds=300, **settings)
    return json.loads(output.splitlines()[-1])


@pytest.mark.parametrize("name", EXPECTED)
def test_a_layer_and_direction_takes_one_collective(found, name):
    assert found[name] == EXPECTED[name]
