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


UNKNOWN = """
import kerasdist as kd

kd.MirroredStrategy(["cpu:0", "cpu:1"])
for devices in (["cpu:99"], ["cpu:0", "cpu:2"]):
    try:
        kd.MirroredStrategy(devices)
    except kd.errors.DeviceError as error:
        print(error)
"""


@pytest.mark.parametrize("backend", ["tensorflow", "jax", "torch"])
def test_defect_10_a_device_that_is_not_there_is_named(backend):
    *_, first, second = run_fresh(UNKNOWN, KERAS_BACKEND=backend).splitlines()
    expected = "which has ['cpu:0', 'cpu:1']. Received: devices=['cpu:{}']. For more CPU devices"
    assert expected.format(99) in first, first
    assert expected.format(2) in second, second


@pytest.mark.parametrize("backend", ["tensorflow", "jax", "torch"])
def test_fewer_devices_after_more(backend):
    assert run_fresh(SCRIPT, KERAS_BACKEND=backend).split()[-1] == "4"
