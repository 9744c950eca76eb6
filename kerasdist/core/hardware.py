"""The rates of accelerators and of their networks, as their makers state them or as measured.

All rates are for one chip and one direction, in bytes or floating-point operations a second.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import final

from kerasdist.errors import DeviceError

_GB = 1e9
_GIB = 2.0**30
_TERA = 1e12
_GBIT = 1e9 / 8
_MICROSECOND = 1e-6


@final
@dataclass(frozen=True)
class Chip:
    """One kind of accelerator, and how several of them are connected.

    Attributes:
        name: The chip's name in the option `--devices` of ``kerasdist plan``.
        title: The chip's name as its maker spells it.
        platform: The name of XLA's compiler for this chip: ``"cuda"`` or ``"tpu"``.
        memory: Bytes of memory of a chip.
        memory_rate: Bytes a second between the chip and its memory.
        flops: For each data type, the floating-point operations a second of the matrix units, when
            they compute in the precision that XLA's matrix products of this type have by default.
        link_rate: Bytes a second that an all-reduce sends over a chip's fast links.
        network_rate: Bytes a second that a chip can send to other machines, or to other slices.
        link_latency: Seconds that one hop over a fast link takes.
        sources: Where the numbers come from.
        usable: The fraction of the chip's memory that JAX reserves by default.
        domain: The largest number of chips that fast links connect: for GPUs, those of one machine;
            for TPUs, those of the largest slice.
        axes: The number of dimensions of the torus that a slice of TPUs forms; 0 if a switch
            connects the chips.
        base_latency: The seconds that the smallest collective takes.
        network_latency: Seconds that one hop between machines, or between slices, takes.
        clock: Cycles a second, for a chip whose compiler estimates the cycles of instructions; 0
            for other chips.
        host_rate: Bytes a second between the host's memory and a chip (PCIe).
        host_source: Where `host_rate` comes from.
    """

    name: str
    title: str
    platform: str
    memory: float
    memory_rate: float
    flops: Mapping[str, float]
    link_rate: float
    network_rate: float
    link_latency: float
    sources: tuple[str, ...]
    usable: float = 1.0
    domain: int = 8
    axes: int = 0
    base_latency: float = 0.0
    network_latency: float = 5.0 * _MICROSECOND
    clock: float = 0.0
    host_rate: float = 16 * _GB
    host_source: str = ""


_NCCL = "latencies: NCCL's own model, github.com/NVIDIA/nccl src/graph/tuning.cc (tree, LL)"
_JAX_MEMORY = "JAX takes 75 % of a GPU's memory: docs.jax.dev/en/latest/gpu_memory_allocation.html"
_ICI = "1 us a hop: jax-ml.github.io/scaling-book/sharding"
_DCN = "latency between slices: 5 us, an assumption"
_PCIE = "host's memory: 16 lanes of PCIe 3 (P100, V100), 4 (A100), 5 (H100, H200), as specified"
_HOST = "host's memory: 16 GB/s a chip (v6e: 32), jax-ml.github.io/scaling-book/tpus"
_PCIE_RATES = {"p100": 15.75, "v100": 15.75, "a100": 31.5, "h100": 63.0, "h200": 63.0}

_KINDS = ("bfloat16", "float16", "float32", "float64")
_HOPPER_FLOPS = (989.4, 989.4, 494.7, 66.9)
# For each GPU: title, memory in bytes, memory rate in GB/s, TFLOP/s of each type in `_KINDS`, rate
# of the links in GB/s, rate of the network in Gbit/s.
# On the A100 and newer GPUs the rate of float32 is that of TF32, in which XLA multiplies float32.
# On older GPUs, which have no bfloat16, the rate of bfloat16 is that of float32.
_GPUS = {
    "p100": ("P100 SXM2 16 GB", 17_071_734_784, 732, (10.6, 21.2, 10.6, 5.3), 72, 50),
    "v100": ("V100 SXM2 32 GB", 34_089_730_048, 900, (15.7, 125, 15.7, 7.8), 120, 50),
    "a100": ("A100 SXM 80 GB", 85_100_068_864, 2039, (312, 312, 156, 19.5), 235, 200),
    "h100": ("H100 SXM 80 GB", 84_942_979_072, 3352, _HOPPER_FLOPS, 370, 400),
    "h200": ("H200 SXM 141 GB", 151_397_597_184, 4800, _HOPPER_FLOPS, 370, 400),
}
_HOPPER_SOURCES = (
    "NVLink: 450 GB/s a direction by its maker, of which an all-reduce of 8 reaches 370, "
    "measured: jax-ml.github.io/scaling-book/gpus",
    "network: 400 Gbit/s a GPU, as in a DGX H100: docs.nvidia.com/dgx/dgxh100-user-guide",
)
_DGX_1 = "network: 50 Gbit/s a GPU, as in a DGX-1 with 4 cards of 100 Gbit/s for 8 GPUs"
_GPU_SOURCES = {
    "p100": (
        "compute, memory: NVIDIA's data sheet of the Tesla P100 (SXM2)",
        "NVLink: 80 GB/s a direction by its maker, of which NCCL counts on 72 (topo.h)",
        _DGX_1,
    ),
    "v100": (
        "compute, memory: NVIDIA's data sheet of the Tesla V100 (SXM2)",
        "NVLink: 150 GB/s a direction by its maker, of which NCCL counts on 120 (topo.h)",
        _DGX_1,
    ),
    "a100": (
        "compute, memory: www.nvidia.com/en-us/data-center/a100 (dense)",
        "NVLink: 300 GB/s a direction by its maker, of which NCCL counts on 235 (tuning.cc)",
        "network: 200 Gbit/s a GPU, as in a DGX A100: docs.nvidia.com/dgx/dgxa100-user-guide",
    ),
    **{
        name: (
            f"compute, memory: www.nvidia.com/en-us/data-center/{name} (dense: half of the sparse)",
            *_HOPPER_SOURCES,
        )
        for name in ("h100", "h200")
    },
}
# For each TPU: memory in GiB, memory rate in GB/s, TFLOP/s of bfloat16, number of matrix units,
# chips of the largest slice, axes of a slice, rates of the links and of the network in Gbit/s.
# The rate of float32 is that of bfloat16, in which XLA multiplies float32 on TPUs. The number of
# matrix units is None for a chip for which XLA estimates no cycles.
_TPUS = {
    "v5e": (16, 819, 197, 4, 256, 2, 1600, 25),
    "v5p": (95, 2765, 459, 8, 6144, 3, 4800, 50),
    "v6e": (32, 1600, 918, None, 256, 2, 3200, 100),
}


def _gpu(name: str) -> Chip:
    title, memory, rate, flops, links, network = _GPUS[name]
    return Chip(
        name=name,
        title=f"NVIDIA {title}",
        platform="cuda",
        memory=memory,
        memory_rate=rate * _GB,
        flops={kind: value * _TERA for kind, value in zip(_KINDS, flops, strict=True)},
        link_rate=links * _GB,
        network_rate=network * _GBIT,
        link_latency=0.52 * _MICROSECOND,
        sources=(*_GPU_SOURCES[name], _NCCL, _JAX_MEMORY),
        usable=0.75,
        base_latency=4.4 * _MICROSECOND,
        host_rate=_PCIE_RATES[name] * _GB,
        host_source=_PCIE,
    )


def _tpu(name: str) -> Chip:
    memory, rate, half, units, domain, axes, links, network = _TPUS[name]
    return Chip(
        name=name,
        title=f"TPU {name}",
        platform="tpu",
        memory=memory * _GIB,
        memory_rate=rate * _GB,
        flops=dict.fromkeys(("bfloat16", "float16", "float32"), half * _TERA),
        link_rate=links * _GBIT,
        network_rate=network * _GBIT,
        link_latency=1.0 * _MICROSECOND,
        sources=(f"compute, memory, links, network: cloud.google.com/tpu/docs/{name}", _ICI, _DCN),
        domain=domain,
        axes=axes,
        clock=0.0 if units is None else half * _TERA / (units * 2 * 128**2),
        host_rate=(32 if name == "v6e" else 16) * _GB,
        host_source=_HOST,
    )


CHIPS = {**{name: _gpu(name) for name in _GPUS}, **{name: _tpu(name) for name in _TPUS}}
"""The accelerators for which ``kerasdist plan`` can predict memory and time, by name."""

_OTHERS = {"pcie", "nvl", "mig"}  # words in the names of slower models and of MIG devices


def chip_of(name: str) -> Chip | None:
    """Returns the chip to which a driver gives this name, such as ``"NVIDIA H100 80GB HBM3"``.

    Returns None for a chip that is not in `CHIPS`.
    """
    words = set(name.lower().replace(" lite", "e").replace("-", " ").split())
    if words == {"tpu", "v5"}:
        return CHIPS["v5p"]
    return next((CHIPS[one] for one in CHIPS if one in words and not words & _OTHERS), None)


_REGISTERS = """
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
"""
# For each GPU: number of multiprocessors, FP32 units of a multiprocessor, clock in GHz, bytes of L2
# cache, bytes of shared memory of a multiprocessor and of a block, major compute capability.
_HOPPER = (132, 128, 1.98, 52_428_800, 233_472, 232_448, 9)
_ARCHITECTURES = {
    # CUDA 13 cannot compile for the P100 and the V100, so they get the A100's compute capability.
    "p100": (56, 64, 1.48, 4_194_304, 65_536, 49_152, 8),
    "v100": (80, 64, 1.53, 6_291_456, 98_304, 98_304, 8),
    "a100": (108, 64, 1.41, 41_943_040, 167_936, 166_912, 8),
    "h100": _HOPPER,
    "h200": _HOPPER,
}


def target_config(chip: Chip) -> str | None:
    """Returns the text that describes a GPU to XLA's compiler; None for a TPU."""
    if chip.platform != "cuda":
        return None
    cores, units, clock, cache, shared, shared_by_choice, major = _ARCHITECTURES[chip.name]
    return f"""gpu_device_info {{{_REGISTERS}
  shared_memory_per_core: {shared}
  shared_memory_per_block_optin: {shared_by_choice}
  core_count: {cores}
  fpus_per_core: {units}
  clock_rate_ghz: {clock}
  l2_cache_size: {cache}
  memory_bandwidth: {round(chip.memory_rate)}
  device_memory_size: {round(chip.memory)}
  cuda_compute_capability {{ major: {major} minor: 0 }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{chip.title}"
"""


_GPU_TARGET = re.compile(r"(?:(\d+)x)?(?:(\d+)x)?([a-z]\w*)")
_TPU_TARGET = re.compile(r"(v\w+):(\d+(?:x\d+)*)")
_EXAMPLES = "8xh100, 2x8xh100 (2 machines of 8), v5e:4x4 or v5p:4x4x8"


@final
@dataclass(frozen=True)
class Target:
    """A number of accelerators of one kind, and how they are connected.

    Attributes:
        chip: The kind of accelerator.
        shape: For GPUs, the number of machines and the number of GPUs of each machine. For TPUs,
            the sizes of a slice's torus along its axes.
        slices: The number of slices, for TPUs; 1 for GPUs.
    """

    chip: Chip
    shape: tuple[int, ...]
    slices: int = 1

    def __str__(self) -> str:
        sizes = "x".join(map(str, self.shape))
        if self.chip.platform == "tpu":
            return f"{self.chip.name}:{sizes}" if self.slices == 1 else f"{self.slices} x {sizes}"
        return f"{sizes.removeprefix('1x')}x{self.chip.name}"

    def with_network(self, part: float) -> Target:
        """Returns this target with the rate between machines or slices multiplied by `part`."""
        if part == 1.0:
            return self
        said = f"network: {part:.0%} of its rate, as --network-efficiency says"
        sources = (*self.chip.sources, said)
        chip = replace(self.chip, network_rate=part * self.chip.network_rate, sources=sources)
        return replace(self, chip=chip)

    @property
    def devices(self) -> int:
        """The number of accelerators."""
        return math.prod(self.shape) * self.slices

    @property
    def usable(self) -> float:
        """How many bytes of an accelerator's memory a program can use."""
        return self.chip.memory * self.chip.usable

    @property
    def domain(self) -> int:
        """The number of accelerators that fast links connect: those of one machine or slice."""
        return self.shape[1] if self.chip.platform == "cuda" else math.prod(self.shape)

    @property
    def topology(self) -> str:
        """The name by which XLA's compiler knows this target."""
        sizes = "x".join(map(str, self.shape))
        return f"1x{sizes}" if self.chip.platform == "cuda" else f"{self.chip.name}:{sizes}"


def parse_target(text: str) -> Target:
    """Returns the accelerators that the option `--devices` of ``kerasdist plan`` names.

    Raises:
        DeviceError: If the text names no accelerators that a plan can be made for.
    """
    name = text.strip().lower()
    if match := _TPU_TARGET.fullmatch(name):
        chip = _chip(match[1], "tpu", text)
        shape = tuple(map(int, match[2].split("x")))
        if len(shape) != chip.axes:
            raise _wrong(text, f"A slice of {chip.title} has {chip.axes} axes.")
        if 0 in shape or math.prod(shape) > chip.domain:
            raise _wrong(text, f"A slice of {chip.title} has 1 to {chip.domain} chips.")
        return Target(chip, shape)
    if match := _GPU_TARGET.fullmatch(name):
        chip = _chip(match[3], "cuda", text)
        first, second = (int(one) if one else 1 for one in match.groups()[:2])
        machines, each = (first, second) if match[2] else (1, first)
        if not machines or not 1 <= each <= chip.domain:
            several = f"{max(2, -(-each // chip.domain))}x{chip.domain}x{chip.name}"
            raise _wrong(text, f"A machine has 1 to {chip.domain} GPUs; several are {several}.")
        return Target(chip, (machines, each))
    raise _wrong(text, f"Known are {', '.join(CHIPS)}.")


def _chip(name: str, platform: str, text: str) -> Chip:
    chip = CHIPS.get(name)
    if chip is None:
        raise _wrong(text, f"Known are {', '.join(CHIPS)}.")
    if chip.platform != platform:
        form = f"{name}:{'x'.join('4' * chip.axes)}" if chip.platform == "tpu" else f"8x{name}"
        raise _wrong(text, f"Write {form}.")
    return chip


def _wrong(text: str, hint: str) -> DeviceError:
    return DeviceError(
        f"Expected accelerators such as {_EXAMPLES}. Received: devices={text!r}. {hint}"
    )


def group_of(chip: Chip, devices: int) -> Target:
    """Returns a target with `devices` devices: full machines of GPUs, or nearly cubic TPU slices.

    Args:
        chip: The kind of accelerator.
        devices: The number of devices; for TPUs a power of two.
    """
    if chip.platform == "cuda":
        each = min(devices, chip.domain)
        return Target(chip, (devices // each, each))
    largest = 1 << (chip.domain.bit_length() - 1)
    in_slice = min(devices, largest)
    shape = [1] * chip.axes
    while math.prod(shape) < in_slice:
        shape[shape.index(min(shape))] *= 2
    return Target(chip, tuple(sorted(shape)), devices // in_slice)
