"""The value of `--devices`, and the table of accelerators."""

import pytest

from kerasdist.core.hardware import CHIPS, chip_of, parse_target, target_config
from kerasdist.errors import DeviceError


@pytest.mark.parametrize(
    ("text", "devices", "domain", "topology"),
    [
        ("h100", 1, 1, "1x1x1"),
        ("8xh100", 8, 8, "1x1x8"),
        (" 2x8xA100 ", 16, 8, "1x2x8"),
        ("v5e:4x4", 16, 16, "v5e:4x4"),
        ("v6e:16x16", 256, 256, "v6e:16x16"),
        ("v5p:16x16x16", 4096, 4096, "v5p:16x16x16"),
    ],
)
def test_names_of_targets(text, devices, domain, topology):
    target = parse_target(text)
    assert (target.devices, target.domain, target.topology) == (devices, domain, topology)
    assert parse_target(str(target)) == target


@pytest.mark.parametrize(
    ("name", "chip"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA H200", "h200"),
        ("Tesla V100-SXM2-32GB", "v100"),
        ("TPU v5 lite", "v5e"),
        ("TPU v5", "v5p"),
        ("TPU v6 lite", "v6e"),
        ("TPU v4", None),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA GeForce RTX 4090", None),
        ("cpu", None),
    ],
)
def test_the_chip_of_a_driver(name, chip):
    found = chip_of(name)
    assert (None if found is None else found.name) == chip


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("8xk80", "Known are p100, v100, a100"),
        ("16xh100", "several are 2x8xh100"),
        ("0xh100", "1 to 8 GPUs"),
        ("v5e", "Write v5e:4x4"),
        ("h100:4x4", "Known are"),
        ("v5p:4x4", "3 axes"),
        ("v5e:32x32", "1 to 256 chips"),
        ("v5e:0x4", "1 to 256 chips"),
        ("", "Known are"),
    ],
)
def test_a_wrong_target_is_refused_with_advice(text, hint):
    with pytest.raises(DeviceError, match=f"Expected accelerators.*Received: devices=.*{hint}"):
        parse_target(text)


@pytest.mark.parametrize("chip", CHIPS.values(), ids=str)
def test_each_number_has_a_source_and_a_size_that_can_be(chip):
    assert all(":" in source for source in chip.sources)
    about = " ".join(chip.sources)
    assert all(word in about for word in ("compute", "memory", "network"))
    assert 10e9 < chip.memory < 300e9
    assert 0.5e12 < chip.memory_rate < 10e12
    assert chip.flops["float16"] >= chip.flops["float32"]
    assert chip.flops["bfloat16"] >= chip.flops["float32"] > 10e12
    assert chip.memory_rate > chip.link_rate > chip.network_rate > 1e9
    assert (target_config(chip) is None) == (chip.platform == "tpu")


def test_makers_numbers():
    """Against figures that a maker states in another form: a whole pod, a whole machine."""
    pod = 16 * 16
    assert CHIPS["v5e"].link_rate * pod == pytest.approx(51.2e12)  # all-reduce of a pod
    assert CHIPS["v5e"].network_rate * pod == pytest.approx(6.4e12 / 8)
    assert CHIPS["v6e"].link_rate * pod == pytest.approx(102.4e12)
    assert CHIPS["v6e"].network_rate * pod == pytest.approx(25.6e12 / 8)
    assert CHIPS["v6e"].flops["bfloat16"] * pod == pytest.approx(234.9e15, rel=1e-2)
    assert CHIPS["h100"].network_rate == pytest.approx(50e9)
