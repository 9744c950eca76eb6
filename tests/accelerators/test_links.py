"""What ``kerasdist doctor`` and ``bench`` learn of GPUs by NVML."""

import pytest

from kerasdist.cli.diagnostics import bench, machine


def verdicts():
    return {one.check: one.verdict for one in machine.look_at_gpus()}


def gpus(number, **facts):
    return [{"uuid": f"GPU-{index:08x}", **facts} for index in range(number)]


def test_without_a_driver(machine_with):
    machine_with(None)
    assert verdicts() == {"devices": "ok"}
    assert machine.gpu_links() == ()
    assert bench.reference(is_one_machine=True) is None


def test_a_driver_that_does_not_work(machine_with):
    machine_with("broken")
    assert verdicts() == {"GPU driver": "problem"}


def test_a_machine_of_eight(machine_with):
    machine_with(gpus(8, nvlinks=18))
    found = list(machine.look_at_gpus())
    assert {one.verdict for one in found} == {"ok"}
    said = {one.check: one.found for one in found}
    assert said["devices"] == "8 x NVIDIA H100 80GB HBM3"
    assert said["links"] == "18 NVLinks on each GPU"
    assert said["GPU driver"].startswith("driver 550.1, for CUDA up to 12.4")
    reference = bench.reference(is_one_machine=True)
    assert (reference.rate, reference.source) == (370e9, "NVLink of NVIDIA H100 SXM 80 GB")
    between = bench.reference(is_one_machine=False)
    assert between.rate == pytest.approx(50e9)


def test_gpus_that_are_joined_by_pcie(machine_with):
    machine_with(gpus(2, name="GeForce RTX 4090"))
    said = {one.check: one.found for one in machine.look_at_gpus()}
    assert said["links"] == "PCIe without NVLink, 31.5 GB/s a direction"
    reference = bench.reference(is_one_machine=True)
    assert reference.source == "PCIe 4 x16"


def test_what_is_slow(machine_with):
    first, second = gpus(2, nvlinks=18)
    machine_with([{**first, "used": 40 << 30, "pcie_width": 8}, {**second, "nvlinks": 17}])
    found = {one.check: one for one in machine.look_at_gpus()}
    assert {one.verdict for name, one in found.items() if name in ("PCIe", "links")} == {"warning"}
    assert found["PCIe"].found == "GPU 0: x8 of x16"
    assert found["GPU memory"].verdict == "warning"
    assert "GPU 0: 42.9 GB of 85.9 GB are used" in found["GPU memory"].found


def test_gpus_of_two_kinds(machine_with):
    first, second = gpus(2)
    machine_with([first, {**second, "name": "NVIDIA A100"}])
    assert verdicts()["devices"] == "warning"


def test_fewer_workers_see_fewer_gpus(machine_with):
    machine_with(4)
    assert bench._first_gpus(2) == {"CUDA_VISIBLE_DEVICES": "0,1"}
    assert bench._first_gpus(4) == {}
    machine_with(4, "3,1,2")
    assert bench._first_gpus(1) == {"CUDA_VISIBLE_DEVICES": "3"}
