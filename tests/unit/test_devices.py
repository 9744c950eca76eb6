"""Names of devices."""

import pytest

from kerasdist.core.devices import Device, check_available, parse_device, parse_devices
from kerasdist.errors import DeviceError


@pytest.mark.parametrize(
    ("name", "kind", "index"),
    [
        ("cpu:0", "cpu", 0),
        ("CPU:3", "cpu", 3),
        ("gpu", "gpu", 0),
        ("cuda:1", "gpu", 1),
        ("/gpu:1", "gpu", 1),
        ("/device:GPU:2", "gpu", 2),
        ("mps", "mps", 0),
        ("XPU:1", "xpu", 1),
        ("/job:localhost/replica:0/task:0/device:TPU:7", "tpu", 7),
    ],
)
def test_every_spelling_is_read(name, kind, index):
    assert parse_device(name) == Device(kind, index)
    assert str(parse_device(name)) == f"{kind}:{index}"  # as Keras names it


@pytest.mark.parametrize("name", ["", "cpu:", "cpu:-1", "disk:0", "cpu:0:1", 3, None])
def test_other_names_are_refused(name):
    with pytest.raises(DeviceError, match="Received: device="):
        parse_device(name)


def test_a_missing_gpu_is_named():
    """Where there is none: `errors.devices_and_arguments_that_are_none` of `tests/facade`."""
    gpus = [Device("gpu", 0), Device("gpu", 1)]
    with pytest.raises(DeviceError, match=r"which has \['gpu:0'\]. Received: devices=\['gpu:1'\]"):
        check_available(gpus, gpus[:1], "torch", [Device("cpu", 0)])


@pytest.mark.parametrize(
    ("devices", "hint"),
    [
        (2, "devices=2. For 2 replicas name 2 devices: ['gpu:0', 'gpu:1']"),
        (2.5, "devices=2.5. For 2 replicas name 2 devices: ['gpu:0', 'gpu:1']"),
        ([0, 1], "device=0. Did you mean 'gpu:0'?"),
        ("cpu:0,cpu:1", "Give a list: ['cpu:0', 'cpu:1']."),
        ("gpu:0, gpu:1", "Give a list: ['gpu:0', 'gpu:1']."),
    ],
)
def test_what_is_no_list_of_names_gets_a_hint(devices, hint):
    with pytest.raises(DeviceError) as caught:
        parse_devices(devices)
    assert hint in str(caught.value)
