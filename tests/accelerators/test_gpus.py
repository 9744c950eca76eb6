"""Which GPUs a process may use."""

from pathlib import Path

import pytest

from kerasdist.core import gpus

A, B, C, D = (f"GPU-{index:08x}" for index in range(4))


def uuids(root="/nowhere", **environ):
    return [gpu.uuid for gpu in gpus.visible(environ, Path(root))]


def test_without_a_driver_there_is_none(machine_with):
    machine_with(None)
    assert uuids() == []
    assert uuids(CUDA_VISIBLE_DEVICES="0") == []
    assert gpus.driver_problem() is None


def test_a_driver_that_does_not_work_says_why(machine_with):
    machine_with("broken")
    assert uuids() == []
    assert gpus.driver_problem() == "Driver/library version mismatch"


def test_a_gpu_has_a_name_and_memory_if_the_driver_tells(machine_with):
    machine_with(1)
    assert gpus.visible({}) == (gpus.Gpu(A, "NVIDIA H100 80GB HBM3", 80 << 30),)
    assert gpus.driver_problem() is None
    machine_with([{"uuid": A, "name": "GeForce RTX 4090", "memory": None}])
    assert gpus.visible({})[0].memory is None


@pytest.mark.parametrize(
    ("variable", "expected"),
    [
        (None, [A, B, C, D]),
        ("2,0", [C, A]),
        (" 1 , 3 ", [B, D]),
        ("1,7,2", [B]),  # up to the first that is not there
        ("", []),
        ("-1", []),
        ("0,-1,1", [A]),
        ("NoDevFiles", []),  # Slurm, for a task without GPUs
        ("1,1", []),  # CUDA shows no GPU if one is named twice
        (f"{D},{B}", [D, B]),
        ("GPU-00000002", [C]),
        ("GPU-0000", []),  # the beginning of more than one
        ("GPU-9", []),
        (f"{A},3", [A, D]),
    ],
)
def test_the_variable_in_all_its_forms(machine_with, variable, expected):
    machine_with(4)
    environ = {} if variable is None else {"CUDA_VISIBLE_DEVICES": variable}
    assert uuids(**environ) == expected


def test_gpus_of_another_container_are_passed_over(machine_with):
    machine_with([{"uuid": A, "hidden": True}, {"uuid": B}, {"uuid": C}])
    assert uuids() == [B, C]
    assert uuids(CUDA_VISIBLE_DEVICES="0") == [B]


def test_a_divided_gpu_shows_one_part_to_a_process(machine_with):
    machine_with([{"uuid": A, "parts": ["MIG-a", "MIG-b"]}, {"uuid": B}])
    assert uuids() == ["MIG-a"]
    assert uuids(CUDA_VISIBLE_DEVICES="MIG-b,MIG-a") == ["MIG-b"]
    assert uuids(CUDA_VISIBLE_DEVICES="0") == ["MIG-a"]
    assert uuids(CUDA_VISIBLE_DEVICES=A) == ["MIG-a"]
    assert uuids(CUDA_VISIBLE_DEVICES="1") == [B]


@pytest.fixture
def amd(tmp_path, machine_with):
    """A machine with a processor and three GPUs of AMD's, of which a container shows two."""
    machine_with(None)
    nodes = tmp_path / "sys/class/kfd/kfd/topology/nodes"
    for number in range(4):
        bank = nodes / str(number) / "mem_banks" / "0"
        bank.mkdir(parents=True)
        (bank / "properties").write_text(f"heap_type 1\nsize_in_bytes {64 << 30}\nflags 0\n")
        (nodes / str(number) / "name").write_text("gfx90a\n" if number else "\n")
        (nodes / str(number) / "properties").write_text(
            f"simd_count {440 if number else 0}\ndrm_render_minor {127 + number if number else 0}\n"
            f"unique_id {number}\nlocation_id {number * 256}\ndomain 0\n"
        )
    (tmp_path / "dev/dri").mkdir(parents=True)
    for minor in (128, 130):
        (tmp_path / f"dev/dri/renderD{minor}").touch()
    return tmp_path


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, [1, 3]),
        ({"ROCR_VISIBLE_DEVICES": "1"}, [3]),
        ({"ROCR_VISIBLE_DEVICES": "GPU-0000000000000003"}, [3]),
        ({"HIP_VISIBLE_DEVICES": "1,0"}, [3, 1]),
        ({"CUDA_VISIBLE_DEVICES": "0"}, [1]),  # which HIP reads too
        ({"CUDA_VISIBLE_DEVICES": "0", "HIP_VISIBLE_DEVICES": "1"}, [3]),
        ({"ROCR_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "0"}, [3]),  # one after the other
        ({"HIP_VISIBLE_DEVICES": "-1"}, []),
    ],
)
def test_gpus_of_amd(amd, environ, expected):
    found = gpus.visible(environ, amd)
    assert [gpu.uuid for gpu in found] == [f"GPU-{number:016x}" for number in expected]
    assert {(gpu.name, gpu.memory) for gpu in found} <= {("gfx90a", 64 << 30)}


def test_gpus_without_a_serial_number_are_known_by_machine_and_place(amd):
    for node in (1, 3):
        file = amd / f"sys/class/kfd/kfd/topology/nodes/{node}/properties"
        file.write_text(file.read_text().replace(f"unique_id {node}", "unique_id 0"))
    first, second = uuids(amd)
    assert first != second
    assert first.endswith("/00000100")


@pytest.mark.parametrize(
    ("machine", "expected"),
    [
        (
            [{"uuid": uuid, "used": 20 << 30} for uuid in (A, "GPU-b")],
            [gpus.Usage(20 << 30, 80 << 30, 0.75)] * 2,
        ),
        (None, []),
        ("broken", []),
        ([{"uuid": A, "memory": None}], []),  # where it is the machine's
        ([{"uuid": A, "parts": ["MIG-1"]}], [gpus.Usage(0, 10 << 30, None)]),
    ],
)
def test_how_much_of_a_gpu_is_in_use(machine_with, machine, expected):
    machine_with(machine)
    watch = gpus.Watch(gpus.visible({}))
    assert watch.usage() == watch.usage() == expected


def test_a_gpu_that_is_gone_stops_nothing(machine_with):
    machine_with(1)
    assert gpus.Watch([gpus.Gpu("GPU-gone", "a GPU", None)]).usage() == []
