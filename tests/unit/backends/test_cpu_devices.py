"""A strategy on some of the prepared CPU devices leaves the others for the next one."""

import os
import subprocess
import sys

import pytest

TIME_LIMIT_S = 90

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
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=os.environ | {"KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == "4"
