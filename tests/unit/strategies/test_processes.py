"""When a `MirroredStrategy` starts a process a device, and who is one of them."""

import warnings
from types import SimpleNamespace

import pytest

from kerasdist.core.devices import Device, parse_devices
from kerasdist.errors import UnsupportedError
from kerasdist.strategies import processes

TORCH, JAX = SimpleNamespace(name="torch"), SimpleNamespace(name="jax")
GPUS = (Device("gpu", 0), Device("gpu", 1))
CPUS = (Device("cpu", 0), Device("cpu", 1))
VARIABLES = ("KERASDIST_MIRRORED", "KERASDIST_RANK", "KERASDIST_CLUSTER", "TF_CONFIG", "RANK")


@pytest.fixture(autouse=True)
def a_script_that_nobody_has_started(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(processes, "why_not_again", lambda: None)
    monkeypatch.setattr(processes, "why_not_unasked", lambda: None)
    monkeypatch.setattr(processes, "is_child", lambda: False)
    monkeypatch.setattr(processes, "current_job", lambda: None)
    monkeypatch.setattr(processes, "_joined", [])


@pytest.mark.parametrize(
    ("backend", "devices", "launcher", "expected"),
    [
        (TORCH, GPUS, None, True),
        (TORCH, GPUS, "threads", False),
        (TORCH, GPUS[:1], "processes", False),
        (TORCH, CPUS, None, False),
        (TORCH, CPUS, "processes", True),
        (JAX, GPUS, None, False),
    ],
)
def test_processes_are_for_several_gpus_on_torch_or_asked_for(backend, devices, launcher, expected):
    with warnings.catch_warnings(action="error"):
        assert processes.are_wanted(backend, devices, launcher) == expected


A_JOB = {"TF_CONFIG": '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker"}}'}


@pytest.mark.parametrize(
    ("reason", "environment", "said"),
    [
        ("this is a notebook", {}, "notebook"),
        (None, A_JOB, "TF_CONFIG"),
        (None, {"KERASDIST_CLUSTER": "none"}, "KERASDIST_CLUSTER=none"),
    ],
)
def test_elsewhere_threads_say_what_they_cost_and_processes_cannot_be_had(
    monkeypatch, reason, environment, said
):
    monkeypatch.setattr(processes, "why_not_again", lambda: reason)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.warns(UserWarning, match=rf"{said}.*no faster.*kerasdist\.launch"):
        assert not processes.are_wanted(TORCH, GPUS, None)
    with pytest.raises(UnsupportedError, match=said):
        processes.are_wanted(TORCH, CPUS, "processes")


def test_a_program_of_a_library_is_started_again_only_if_asked(monkeypatch):
    monkeypatch.setattr(processes, "why_not_unasked", lambda: "this is pytest")
    with pytest.warns(UserWarning, match="this is pytest"):
        assert not processes.are_wanted(TORCH, GPUS, None)
    assert processes.are_wanted(TORCH, GPUS, "processes")


def test_what_multiprocessing_has_started_starts_nothing_and_is_no_worker(monkeypatch):
    monkeypatch.setattr(processes, "is_child", lambda: True)
    monkeypatch.setenv("KERASDIST_MIRRORED", "gpu:0,gpu:1")
    assert processes.devices_from_launcher() is None
    assert processes.are_started_by_script()
    assert not processes.are_wanted(TORCH, GPUS, "processes")


@pytest.mark.parametrize(
    ("told", "devices", "others"),
    [
        (None, None, False),
        ("gpu:0,gpu:1", "gpu:0,gpu:1", True),
        ("own", "own", False),
        ("joined", None, False),  # a program that a worker has started
    ],
)
def test_who_is_a_worker(monkeypatch, told, devices, others):
    if told is not None:
        monkeypatch.setenv("KERASDIST_MIRRORED", told)
    assert processes.devices_from_launcher() == devices
    assert processes.are_started_by_script() == others


def test_a_second_strategy_finds_the_devices_of_the_first(monkeypatch):
    monkeypatch.setenv("KERASDIST_MIRRORED", "cpu:0,cpu:0")
    processes.after_joining("cpu:0,cpu:0")
    monkeypatch.setattr(processes, "current_job", object)
    assert processes.devices_from_launcher() == "cpu:0,cpu:0"
    processes.check_same(CPUS, "cpu:0,cpu:0")
    with pytest.raises(UnsupportedError, match="devices=\\['gpu:0', 'gpu:1'\\]"):
        processes.check_same(GPUS, "cpu:0,cpu:0")


def test_the_device_of_a_worker():
    assert processes.checked_names(None, "gpu:2,gpu:5", 2, 1) == ["gpu:5"]
    assert processes.checked_names(None, "own", 2, 1) is None
    assert processes.checked_names(["gpu:0", "gpu:1"], "own", 2, 1) is None
    assert processes.checked_names(["cpu:0", "cpu:1"], "own", 2, 1) == ["cpu:0"]
    with pytest.raises(UnsupportedError, match="each of the 3 workers"):
        processes.checked_names(["gpu:0", "gpu:1"], "own", 3, 1)


def test_what_is_no_launcher():
    with pytest.raises(ValueError, match="launcher='fork'"):
        processes.checked_launcher("fork", TORCH)
    with pytest.raises(UnsupportedError, match="on jax one process drives all"):
        processes.checked_launcher("processes", JAX)


def test_devices_by_rank():
    assert processes._by_rank(parse_devices(["gpu:3", "gpu:1"])) == ["gpu:3", "gpu:1"]
    assert processes._by_rank(CPUS) == ["cpu:0", "cpu:0"]
