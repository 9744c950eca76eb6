"""A strategy on some of the prepared CPU devices leaves the others for the next one."""

import pytest

from tests.fresh import run_fresh

SCRIPT = """
import kerasdist as kd

kd.config.set_logical_cpu_devices(4)
kd.MirroredStrategy(["cpu:0", "cpu:1"])
import keras

keras.ops.ones(1)  # the backend has started now
print(kd.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2", "cpu:3"]).num_replicas_in_sync)
"""


@pytest.mark.parametrize("backend", ["tensorflow", "jax", "torch"])
def test_fewer_devices_after_more(backend):
    assert run_fresh(SCRIPT, KERAS_BACKEND=backend).split()[-1] == "4"
