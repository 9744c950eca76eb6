"""Which GPUs `kerasdist run` gives to its workers, and what `kerasdist info` says of them."""

import dataclasses
import os
import sys

import pytest

from kerasdist.cli.diagnostics import info
from kerasdist.cli.launch import report, start
from kerasdist.cli.launch.placement import Slot, place
from kerasdist.cli.launch.spec import JobSpec
from kerasdist.core import gpus
from tests.accelerators.conftest import FAKE_NVML
from tests.fresh import SECONDS
from tests.multiprocess.launching import supervised
from tests.unit.cli.diagnostics.test_info import shown
from tests.unit.cluster import environments as env

A, B, C, D = (f"GPU-{index:08x}" for index in range(4))


def given(variable, workers):
    environ = {} if variable is None else {"CUDA_VISIBLE_DEVICES": variable}
    return [each.get("CUDA_VISIBLE_DEVICES") for each in gpus.divide(environ, workers)]


@pytest.mark.parametrize(
    ("variable", "workers", "expected"),
    [
        (None, 2, ["0,1", "2,3"]),
        (None, 3, ["0", "1", "2"]),  # as many for each
        (None, 1, [None]),  # one worker keeps what there is
        (None, 5, [None] * 5),  # too few: the strategy says so
        ("2,3", 2, ["2", "3"]),
        ("1,0,3", 2, ["1", "0"]),
        (f"{A},{B}", 2, [A, B]),
        ("MIG-a,MIG-b", 2, ["MIG-a", "MIG-b"]),
        ("", 2, [None, None]),
        ("-1", 2, [None, None]),
    ],
)
def test_workers_divide_the_gpus_that_they_may_see(machine_with, variable, workers, expected):
    machine_with("4")
    assert given(variable, workers) == expected


def test_numbers_are_those_of_the_machine_s_slots(machine_with):
    machine_with("4")
    assert gpus.divide({}, 2)[0]["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    chosen = gpus.divide({"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}, 2)[0]
    assert chosen["CUDA_DEVICE_ORDER"] == "FASTEST_FIRST"
    # The user's numbers keep the meaning that they have.
    assert "CUDA_DEVICE_ORDER" not in gpus.divide({"CUDA_VISIBLE_DEVICES": "0,1"}, 2)[0]


def test_a_container_with_some_of_the_gpus(machine_with):
    """Its device files are nvidia2 and nvidia3, which CUDA counts 0 and 1."""
    machine_with(
        [{"uuid": A, "hidden": True}, {"uuid": B, "hidden": True}, {"uuid": C}, {"uuid": D}]
    )
    assert given(None, 2) == ["0", "1"]
    machine_with(None)
    assert gpus.divide({}, 2) == [{}, {}]


def test_gpus_of_amd_have_a_variable_of_their_own(monkeypatch):
    two = [gpus.Gpu(f"GPU-{index}", "gfx90a", None, "AMD") for index in range(2)]
    monkeypatch.setattr(gpus, "visible", lambda environ: two)
    assert [each["HIP_VISIBLE_DEVICES"] for each in gpus.divide({}, 2)] == ["0", "1"]
    by_cuda = gpus.divide({"CUDA_VISIBLE_DEVICES": "2,3"}, 2)
    assert [each["CUDA_VISIBLE_DEVICES"] for each in by_cuda] == ["2", "3"]


def test_each_worker_is_started_with_its_own(machine_with):
    machine_with("2")
    spec, slots = JobSpec(("true",), workers=2), place(2, [])
    given = start.variables_of(spec, slots, "localhost:1", 0)
    orders = [start.supervised(spec, *one)[0] for one in zip(slots, given, strict=True)]
    assert [each["variables"]["CUDA_VISIBLE_DEVICES"] for each in orders] == ["0", "1"]


def idle(workers, **more):
    lines = report.of_start(JobSpec(("true",), **more), place(workers, [])).splitlines()
    return [line for line in lines if "idle" in line]


def test_gpus_that_stay_idle_are_told_in_one_line(machine_with, monkeypatch):
    machine_with("8")
    monkeypatch.delenv("KERASDIST_CPU_DEVICES", raising=False)
    assert idle(3) == ["2 of the 8 GPUs of this machine stay idle: 3 workers have 2 each"]
    assert idle(1) == idle(4) == idle(9) == []
    assert idle(3, devices_per_worker=2) == []


def owners(environ):
    return [gpu.local_worker for gpu in info.gather(environ).gpus]


def test_info_shows_the_gpus_and_what_a_strategy_would_use(machine_with):
    machine_with("2")
    [first, second] = dataclasses.asdict(info.gather({"KERAS_BACKEND": "jax"}))["gpus"]
    assert first["uuid"] == A
    assert second["memory"] == 80 << 30
    text = shown({"KERAS_BACKEND": "jax"})
    for word in ("gpu:1", "NVIDIA H100 80GB HBM3", "80 GiB", B):
        assert word in text
    assert "use: MirroredStrategy on gpu:0, gpu:1, if jax is built for GPUs" in text
    assert "OneDeviceStrategy on gpu:0," in shown({"CUDA_VISIBLE_DEVICES": "1"})
    assert "OneDeviceStrategy on no GPU" in shown({"CUDA_VISIBLE_DEVICES": ""})
    assert "MirroredStrategy on cpu:0, cpu:1" in shown({"KERASDIST_CPU_DEVICES": "2"})


def test_info_shows_who_gets_which(machine_with):
    machine_with("8")
    torchrun = {**env.TORCHRUN, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "3"}
    assert owners({}) == [0] * 8
    assert owners(torchrun) == [0, 0, 1, 1, 2, 2, None, None]
    assert "MultiWorkerMirroredStrategy, here on gpu:2, gpu:3," in shown(torchrun)
    machine_with("2")
    assert owners(torchrun) == [1, 1]  # a scheduler gave it these
    machine_with("broken")
    assert "NVIDIA's driver does not work: Driver/library version mismatch" in shown({})


def test_another_machine_counts_its_own_gpus():
    others = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    path = os.pathsep.join([str(FAKE_NVML), *sys.path])
    code = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"
    spec = JobSpec((sys.executable, "-c", code))
    orders = start.orders_of(spec, Slot("far", 3, 1, 2), {})
    orders["gpus_of"] = 1
    command = (sys.executable, "-P", "-m", "kerasdist.cli.launch.supervisor")
    environ = {**others, "PYTHONPATH": path, "FAKE_NVML": "4"}
    with supervised(orders, command, env=environ) as supervisor:
        assert supervisor.stdout.read() == "2,3\n"
        assert supervisor.wait(SECONDS) == 0
