"""Which accelerators a worker takes."""

import platform

import pytest

from kerasdist.devices import Device
from kerasdist.errors import DeviceError
from kerasdist.strategies import multi_worker


class FakeJob:
    """The facts of all workers; those of this one come from the environment."""

    def __init__(self, rank, others):
        self.rank = rank
        self._others = others

    def all_gather_object(self, label, value):
        everyone = list(self._others)
        everyone.insert(self.rank, value)
        return everyone


def gpus(count):
    return tuple(Device("gpu", index) for index in range(count))


def seen(visible, host=None, kind="gpu"):
    return [kind, host or platform.node(), visible, None, None, None]


@pytest.fixture(autouse=True)
def no_scheduler(monkeypatch):
    for name in multi_worker._VISIBLE:
        monkeypatch.delenv(name, raising=False)


def test_workers_that_see_the_same_divide_them():
    job = FakeJob(1, [seen(None), seen(None, host="elsewhere"), seen(None, host="elsewhere")])
    assert multi_worker._own_share(gpus(4), job) == gpus(4)[2:]


def test_a_scheduler_may_have_divided_them(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    job = FakeJob(1, [seen("0,1")])
    assert multi_worker._own_share(gpus(2), job) == gpus(2)


def test_too_few_for_all_is_an_error():
    job = FakeJob(0, [seen(None), seen(None)])
    with pytest.raises(DeviceError, match="each of the 3 workers"):
        multi_worker._own_share(gpus(2), job)


def test_cpu_devices_are_a_process_s_own():
    cpus = (Device("cpu", 0), Device("cpu", 1))
    job = FakeJob(0, [seen(None, kind="cpu")])
    assert multi_worker._own_share(cpus, job) == cpus
