"""What accelerators and their networks can do: numbers of their makers, and of measurements.

All rates are of one chip and of one direction, in bytes or floating-point operations a second.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

_GB = 1e9
_GIB = 2.0**30
_TERA = 1e12
_GBIT = 1e9 / 8
_MICROSECOND = 1e-6


@final
@dataclass(frozen=True)
class Chip:
    """One kind of accelerator, and how several are connected.

    Attributes:
        name: As `--devices` spells it.
        title: As its maker spells it.
        platform: XLA's compiler: ``"cuda"`` or ``"tpu"``.
        memory: Bytes of memory.
        usable: The part of it that JAX takes by default.
        memory_rate: Bytes a second between the chip and its memory.
        flops: Operations a second of the matrix units, by the type of the operands as XLA
            multiplies them by default.
        domain: How many chips the fast links connect: GPUs of a machine, TPU chips of a slice.
        axes: Dimensions of the torus that a slice of TPUs forms; 0: a switch connects all.
        link_rate: Bytes a second that an all-reduce sends over a chip's fast links.
        network_rate: Bytes a second that a chip has between machines, or between slices.
        base_latency: Seconds that a collective takes at least.
        link_latency: Seconds of a step over a fast link.
        network_latency: Seconds of a step between machines, or between slices.
        clock: Cycles a second, where XLA estimates the cycles of its instructions; 0: unknown.
        sources: Where the numbers come from.
    """

    name: str
    title: str
    platform: str
    memory: float
    usable: float
    memory_rate: float
    flops: Mapping[str, float]
    domain: int
    axes: int
    link_rate: float
    network_rate: float
    base_latency: float
    link_latency: float
    network_latency: float
    clock: float
    sources: tuple[str, ...]


# XLA multiplies float32 in TF32 on NVIDIA GPUs, and in bfloat16 on TPUs, where Keras asks for no
# other precision.
def _gpu_flops(half: float, tf32: float, double: float) -> dict[str, float]:
    return {
        "bfloat16": half * _TERA,
        "float16": half * _TERA,
        "float32": tf32 * _TERA,
        "float64": double * _TERA,
    }


def _tpu_flops(bfloat16: float) -> dict[str, float]:
    return dict.fromkeys(("bfloat16", "float16", "float32"), bfloat16 * _TERA)


_NCCL = "latencies: NCCL's own model, github.com/NVIDIA/nccl src/graph/tuning.cc (tree, LL)"
_JAX_MEMORY = "JAX takes 75 % of a GPU's memory: docs.jax.dev/en/latest/gpu_memory_allocation.html"
_ICI = "1 us a hop: jax-ml.github.io/scaling-book/sharding"
_DCN = "latency between slices: 5 us, an assumption"


def _nvidia(
    name: str,
    title: str,
    *sources: str,
    memory: float,
    memory_rate: float,
    flops: dict[str, float],
    link_rate: float,
    network_rate: float,
) -> Chip:
    return Chip(
        name=name,
        title=title,
        platform="cuda",
        memory=memory,
        usable=0.75,
        memory_rate=memory_rate * _GB,
        flops=flops,
        domain=8,
        axes=0,
        link_rate=link_rate * _GB,
        network_rate=network_rate * _GBIT,
        base_latency=4.4 * _MICROSECOND,
        link_latency=0.52 * _MICROSECOND,
        network_latency=5.0 * _MICROSECOND,
        clock=0.0,
        sources=(*sources, _NCCL, _JAX_MEMORY),
    )


def _google(
    name: str,
    *,
    memory: float,
    memory_rate: float,
    bfloat16: float,
    matrix_units: int | None,  # of 128 x 128
    domain: int,
    axes: int,
    link_rate: float,
    network_rate: float,
) -> Chip:
    return Chip(
        name=name,
        title=f"TPU {name}",
        platform="tpu",
        memory=memory * _GIB,
        usable=1.0,
        memory_rate=memory_rate * _GB,
        flops=_tpu_flops(bfloat16),
        domain=domain,
        axes=axes,
        link_rate=link_rate * _GBIT,
        network_rate=network_rate * _GBIT,
        base_latency=0.0,
        link_latency=1.0 * _MICROSECOND,
        network_latency=5.0 * _MICROSECOND,
        clock=0.0 if matrix_units is None else bfloat16 * _TERA / (matrix_units * 2 * 128**2),
        sources=(f"compute, memory, links, network: cloud.google.com/tpu/docs/{name}", _ICI, _DCN),
    )


def _hopper(name: str, title: str, *, memory: float, memory_rate: float) -> Chip:
    return _nvidia(
        name,
        title,
        f"compute, memory: www.nvidia.com/en-us/data-center/{name} (dense: half of the sparse)",
        "NVLink: 450 GB/s a direction by its maker, of which an all-reduce of 8 reaches 370, "
        "measured: jax-ml.github.io/scaling-book/gpus",
        "network: 400 Gbit/s a GPU, as in a DGX H100: docs.nvidia.com/dgx/dgxh100-user-guide",
        memory=memory,
        memory_rate=memory_rate,
        flops=_gpu_flops(half=989.4, tf32=494.7, double=66.9),
        link_rate=370,
        network_rate=400,
    )


CHIPS: dict[str, Chip] = {
    chip.name: chip
    for chip in (
        _nvidia(
            "a100",
            "NVIDIA A100 SXM 80 GB",
            "compute, memory: www.nvidia.com/en-us/data-center/a100 (dense)",
            "NVLink: 300 GB/s a direction by its maker, of which NCCL counts on 235 (tuning.cc)",
            "network: 200 Gbit/s a GPU, as in a DGX A100: docs.nvidia.com/dgx/dgxa100-user-guide",
            memory=85_100_068_864,
            memory_rate=2039,
            flops=_gpu_flops(half=312, tf32=156, double=19.5),
            link_rate=235,
            network_rate=200,
        ),
        _hopper("h100", "NVIDIA H100 SXM 80 GB", memory=84_942_979_072, memory_rate=3352),
        _hopper("h200", "NVIDIA H200 SXM 141 GB", memory=151_397_597_184, memory_rate=4800),
        _google(
            "v5e",
            memory=16,
            memory_rate=819,
            bfloat16=197,
            matrix_units=4,
            domain=256,
            axes=2,
            link_rate=1600,
            network_rate=25,
        ),
        _google(
            "v5p",
            memory=95,
            memory_rate=2765,
            bfloat16=459,
            matrix_units=8,
            domain=6144,
            axes=3,
            link_rate=4800,
            network_rate=50,
        ),
        _google(
            "v6e",
            memory=32,
            memory_rate=1600,
            bfloat16=918,
            matrix_units=None,
            domain=256,
            axes=2,
            link_rate=3200,
            network_rate=100,
        ),
    )
}
"""The accelerators that a plan can be made for, by name."""

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
# What differs: multiprocessors, their units, clock, caches, version of the architecture.
_HOPPER = (132, 128, 1.98, 52_428_800, 233_472, 232_448, 9)
_ARCHITECTURES = {
    "a100": (108, 64, 1.41, 41_943_040, 167_936, 166_912, 8),
    "h100": _HOPPER,
    "h200": _HOPPER,
}


def target_config(chip: Chip) -> str | None:
    """Returns the description of a GPU that XLA compiles for; None for a TPU, which it knows."""
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
