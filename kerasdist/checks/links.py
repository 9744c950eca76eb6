"""What the links between devices allow: by NVML and tables, or measured."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from kerasdist.core import gpus
from kerasdist.plan.hardware import CHIPS, Chip

# Bytes per second of one PCIe lane in one direction, by generation, after encoding.
_PCIE_LANE = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
_MAX_NVLINKS = 18
_COPIED = 64 << 20


@final
@dataclass(frozen=True)
class Reference:
    """What an all-reduce could reach at most.

    Attributes:
        rate: Bytes a second that a device sends.
        source: Who says so.
    """

    rate: float
    source: str


@final
@dataclass(frozen=True)
class GpuLinks:
    """How a GPU is connected.

    Attributes:
        name: Its maker's name for it.
        nvlinks: How many NVLinks are active.
        pcie_generation: Of its slot, or of itself if that is less; None where it is not known.
        pcie_width: How many lanes it uses.
        pcie_max_width: How many lanes it has.
    """

    name: str
    nvlinks: int
    pcie_generation: int | None
    pcie_width: int | None
    pcie_max_width: int | None

    @property
    def pcie_rate(self) -> float | None:
        """Bytes a second over PCIe in one direction."""
        if self.pcie_generation not in _PCIE_LANE or self.pcie_width is None:
            return None
        return _PCIE_LANE[self.pcie_generation] * self.pcie_width


def gpu_links() -> tuple[GpuLinks, ...]:
    """Returns how this machine's NVIDIA GPUs are connected; none without a driver."""
    with gpus.opened_nvml() as nvml:
        return () if nvml is None else tuple(_each(nvml))


def _each(nvml: Any) -> Iterator[GpuLinks]:
    for _, handle in gpus.handles(nvml):

        def ask(name: str, *arguments: Any, handle: Any = handle) -> int | None:
            try:
                return int(getattr(nvml, name)(handle, *arguments))
            except nvml.NVMLError:  # the GPU has no such thing
                return None

        yield GpuLinks(
            name=nvml.nvmlDeviceGetName(handle),
            nvlinks=sum(ask("nvmlDeviceGetNvLinkState", link) == 1 for link in range(_MAX_NVLINKS)),
            pcie_generation=ask("nvmlDeviceGetMaxPcieLinkGeneration"),
            pcie_width=ask("nvmlDeviceGetCurrPcieLinkWidth"),
            pcie_max_width=ask("nvmlDeviceGetMaxPcieLinkWidth"),
        )


def chip_of(name: str) -> Chip | None:
    """Returns the entry of the table for a GPU's name, such as ``"NVIDIA H100 80GB HBM3"``."""
    words = name.lower().replace("-", " ").split()
    return next((chip for chip in CHIPS.values() if chip.name in words), None)


def reference(device: str, *, is_one_machine: bool) -> Reference | None:
    """Returns what the links between devices of a kind allow; None: not known.

    Args:
        device: The name of a device, such as ``"gpu:0"``.
        is_one_machine: Whether all devices are in this machine.
    """
    if device.startswith("cpu"):
        if not is_one_machine:
            return None
        return Reference(_memory_rate(), "copying within this machine's memory, measured")
    found = gpu_links()
    if not found:
        return None
    first, chip = found[0], chip_of(found[0].name)
    if not is_one_machine:
        return None if chip is None else Reference(chip.network_rate, f"network of {chip.title}")
    if first.nvlinks and chip is not None:
        return Reference(chip.link_rate, f"NVLink of {chip.title}")
    if first.nvlinks or first.pcie_rate is None:
        return None
    return Reference(first.pcie_rate, f"PCIe {first.pcie_generation} x{first.pcie_width}")


def _memory_rate() -> float:
    """Returns how many bytes a second one core copies, the best of three times."""
    source = np.ones(_COPIED, "uint8")
    target = np.empty_like(source)
    seconds: list[float] = []
    for _ in range(3):
        began = time.perf_counter()
        np.copyto(target, source)
        seconds.append(time.perf_counter() - began)
    return _COPIED / min(seconds)
