"""Which GPUs each worker of a job takes, told before the frameworks start; simulated workers."""

import platform
import types

import pytest

from kerasdist.backends.base.interface import Backend
from kerasdist.core.devices import Device
from kerasdist.errors import DeviceError
from kerasdist.strategies import choice

A, B, C, D = (f"GPU-{index:08x}" for index in range(4))


class FakeBackend:
    name = "jax"

    def __init__(self, built=True, sees=0):
        self._built = built
        self._sees = sees

    def uses_gpus(self):
        return self._built

    def devices(self, kind):
        return tuple(Device(kind, index) for index in range(self._sees if kind == "gpu" else 1))

    def accelerators(self):
        return self.devices("gpu")


def job_of(rank, workers, gather):
    return types.SimpleNamespace(
        rank=rank,
        num_workers=workers,
        who=f"[worker {rank}/{workers}]",
        all_gather_object=lambda label, value: gather(value),
    )


@pytest.fixture
def agreed(machine_with, monkeypatch):
    """Returns what each worker takes, given its machine, GPUs, variable and named devices."""
    monkeypatch.delenv("KERASDIST_CPU_DEVICES", raising=False)

    def enter(worker):
        machine_with(worker.get("gpus", "4"), worker.get("visible"))
        if "cpus" in worker:
            monkeypatch.setenv("KERASDIST_CPU_DEVICES", worker["cpus"])
        monkeypatch.setattr(platform, "node", lambda: worker.get("host", "h"))
        return FakeBackend(worker.get("built", True)), worker.get("names")

    def run(*workers):
        seen = []
        for rank, worker in enumerate(workers):  # what each tells the others
            backend, names = enter(worker)
            job = job_of(rank, len(workers), lambda value: seen.append(value) or 1 / 0)
            with pytest.raises(ZeroDivisionError):
                choice.agree(backend, job, names)
        taken = []
        for rank, worker in enumerate(workers):  # what each does with what they all told
            backend, names = enter(worker)
            job = job_of(rank, len(workers), lambda value: list(seen))
            taken.append(choice.agree(backend, job, names).numbers)
        return taken

    return run


def test_workers_that_see_the_same_divide_them(agreed):
    """srun --gpus-per-node, torchrun, mpirun."""
    assert agreed({}, {}) == [[0, 1], [2, 3]]
    assert agreed({}, {}, {}, {}) == [[0], [1], [2], [3]]


def test_a_scheduler_that_gives_each_task_its_own_as_number_0(agreed):
    """Slurm --gpus-per-task: equal variables, other GPUs."""
    tasks = [{"gpus": [{"uuid": uuid}], "visible": "0"} for uuid in (A, B, C, D)]
    assert agreed(*tasks) == [[0], [0], [0], [0]]


def test_a_scheduler_that_gives_each_task_some_of_those_that_all_see(agreed):
    assert agreed({"visible": "0,1"}, {"visible": "2,3"}) == [[0, 1], [0, 1]]
    assert agreed({"visible": A}, {"visible": "1"}) == [[0], [0]]


FAR = {"host": "far", "gpus": [{"uuid": "GPU-x"}, {"uuid": "GPU-y"}]}
NEAR = {"gpus": [{"uuid": A}, {"uuid": B}]}


@pytest.mark.parametrize(
    ("workers", "taken"),
    [
        ([NEAR, FAR, NEAR, FAR], [[0], [0], [1], [1]]),  # each machine is divided by itself
        ([{"gpus": [{"uuid": one}]} for one in (C, D)], [[0], [0]]),  # containers of one name
        ([{"visible": "0,1"}, {"visible": "1,0"}], [[0], [0]]),  # the same in another order
        ([{"visible": "0,1,2,3"}, {"visible": "3,2,1,0"}], [[0, 1], [0, 1]]),
        ([{"gpus": None}] * 2, [None, None]),
        ([{"visible": ""}, {"visible": "-1"}], [None, None]),
        ([{"gpus": "1", "built": False}] * 3, [None] * 3),  # a framework for CPUs
        ([{"built": None}] * 2, [None, None]),
        ([{"gpus": "1", "cpus": "2"}] * 2, [[], []]),  # the variable hides GPUs
        ([{"names": ["gpu:2"]}, {"names": ["gpu:1", "gpu:0"]}], [[2], [0, 1]]),
        ([{"names": ["cpu:0"]}] * 2, [None, None]),
    ],
)
def test_what_workers_take(agreed, workers, taken):
    assert agreed(*workers) == taken


def test_gpus_that_stay_idle_are_told_by_one_worker(agreed):
    with pytest.warns(UserWarning, match="idle") as warned:
        assert agreed({}, {}, {}) == [[0], [1], [2]]
    [warning] = warned
    assert str(warning.message) == (
        "[worker 0/3] 1 of the 4 GPUs of h stay idle: its 3 workers have 1 each."
    )


def test_too_few_name_the_machine_and_the_gpus(agreed):
    with pytest.raises(DeviceError, match=r"each of the 3 workers of h\. Received: gpus=.*GPU-0"):
        agreed(*[{"gpus": [{"uuid": A}, {"uuid": B}]}] * 3)


def test_some_that_two_see_and_some_that_one_sees(agreed):
    with pytest.raises(DeviceError, match=r"worker 0 sees .* and worker 1 "):
        agreed({"visible": "0,1"}, {"visible": "1,2"})


def test_a_named_gpu_that_is_not_there(agreed):
    with pytest.raises(DeviceError, match=r"which has \['gpu:0', .*Received: devices=\['gpu:4'\]"):
        agreed({"names": ["gpu:4"]}, {})


def gpus_of(*numbers):
    return tuple(Device("gpu", number) for number in numbers)


def test_devices_have_the_framework_s_names_afterwards():
    backend = FakeBackend()
    assert choice.devices_of_worker(backend, [2], gpus_of(0), None) == [Device("gpu", 0)]
    assert choice.devices_of_worker(backend, [2], gpus_of(0), ["gpu:2"]) == [Device("gpu", 0)]
    assert choice.devices_of_worker(backend, [2], gpus_of(2), ["gpu:2"]) == [
        Device("gpu", 2)
    ]  # torch
    two = choice.devices_of_worker(backend, [1, 3], gpus_of(0, 1), ["gpu:3", "cpu:0", "gpu:1"])
    assert [str(device) for device in two] == ["gpu:1", "cpu:0", "gpu:0"]


def test_a_framework_that_does_not_see_what_was_agreed(machine_with):
    machine_with("4")
    with pytest.raises(DeviceError, match=rf"{D} \(NVIDIA H100 80GB HBM3\).*sees 1"):
        choice.devices_of_worker(FakeBackend(), [2, 3], gpus_of(0), None)


def test_gpus_that_only_the_framework_finds_are_divided_by_machine(machine_with, monkeypatch):
    """In a container without NVML."""
    machine_with(None)
    monkeypatch.setattr(platform, "node", lambda: "h")
    seen = [["h", []], ["far", []], ["h", []]]
    own = choice.agree(FakeBackend(), job_of(2, 3, lambda value: seen), None)
    assert own == choice.Choice(None, [0, 2])
    four = FakeBackend(sees=4).devices("gpu")
    assert choice.own_part(four, own.peers, 2) == list(four[2:])
    assert choice.own_part(four[:1], own.peers, 2) == four[:1]
    cpus = (Device("cpu", 0), Device("cpu", 1))
    assert choice.own_part(cpus, own.peers, 2) == cpus
    # Which the framework was told to take are left as they are.
    machine_with("4")
    told = job_of(0, 2, lambda value: [["h", []], ["h", []]])
    assert choice.agree(FakeBackend(built=None), told, None) == choice.Choice(None, [])


@pytest.mark.parametrize(
    ("gpus", "built", "visible", "words"),
    [
        ("2", True, None, [A, "sees none", "driver may be too old", "KERASDIST_CPU_DEVICES=1"]),
        ("2", True, "0", ["driver may be too old"]),
        ("2", False, "0", ["built for CPUs", "pip install 'jax[cuda12]'"]),
        ("broken", True, "0", ["Driver/library version mismatch"]),
    ],
)
def test_a_promised_gpu_that_the_framework_does_not_see(machine_with, gpus, built, visible, words):
    machine_with(gpus, visible)
    with pytest.raises(DeviceError) as error:
        choice.check_promise(FakeBackend(built))
    for word in words:
        assert word in str(error.value)


def test_a_framework_for_cpus_on_a_machine_with_gpus_is_one_warning(machine_with):
    machine_with("2")
    with pytest.warns(UserWarning, match=r"has 2 GPUs that jax, which is built for CPUs") as warned:
        choice.check_promise(FakeBackend(built=False))
    assert len(warned) == 1


@pytest.mark.parametrize(
    ("gpus", "built", "visible"),
    [
        (None, True, None),
        (None, True, "0"),  # a line that many scripts have
        ("2", True, ""),
        ("2", False, "-1"),
        ("2", None, "0"),  # the script has told the framework to leave them
        ("broken", True, None),  # an image for machines with and without GPUs
        ("broken", False, "-1"),
    ],
)
def test_where_no_gpu_is_promised_the_cpu_is_right(machine_with, gpus, built, visible):
    machine_with(gpus, visible)
    choice.check_promise(FakeBackend(built))


def test_cpu_devices_that_a_variable_chooses_come_before_accelerators(machine_with, monkeypatch):
    monkeypatch.setattr(choice.config, "apply_cpu_devices_variable", lambda: None)
    monkeypatch.delenv("KERASDIST_CPU_DEVICES", raising=False)
    backend = FakeBackend(sees=2)
    assert choice.chosen_devices(backend, None) == (Device("gpu", 0), Device("gpu", 1))
    monkeypatch.setenv("KERASDIST_CPU_DEVICES", "1")
    assert choice.chosen_devices(backend, None) == (Device("cpu", 0),)
    assert choice.chosen_devices(backend, ["gpu:1"]) == (Device("gpu", 1),)  # named ones come first
    monkeypatch.delenv("KERASDIST_CPU_DEVICES")
    machine_with("2")  # and no fall-back to the CPU in silence
    with pytest.raises(DeviceError, match="sees none"):
        choice.chosen_devices(FakeBackend(sees=0), None)


@pytest.mark.parametrize("kind", ["tpu", "gpu", "xpu", "mps"])
def test_any_kind_of_accelerator_comes_before_the_cpu(kind):
    one = (Device(kind, 0),)
    backend = types.SimpleNamespace(devices=lambda asked: one if asked == kind else ())
    assert Backend.accelerators(backend) == one
