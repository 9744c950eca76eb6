"""What ``kerasdist doctor`` says of GPUs: driver, CUDA, NCCL, memory, links."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from importlib import metadata
from typing import Any

from kerasdist.checks.findings import Finding
from kerasdist.checks.jobs import has_accelerator
from kerasdist.checks.links import GpuLinks, gpu_links
from kerasdist.core import gpus
from kerasdist.plan.report import size

_NCCL = ("nvidia-nccl-cu12", "nvidia-nccl-cu13")
_JAX_CUDA = ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13")
_BUSY = 0.1


def look() -> Iterator[Finding]:
    """Yields findings about this machine's accelerators."""
    problem = gpus.driver_problem()
    if problem is not None:
        said = "No GPU can be used. Reinstall NVIDIA's driver, or start the machine again."
        yield Finding("GPU driver", "problem", problem, said)
        return
    seen = gpus.visible()
    if not seen:
        yield _without(has_accelerator())
        return
    yield _devices(seen)
    if seen[0].maker == "NVIDIA":
        yield from _nvidia()


def is_built_for_gpus(backend: str) -> bool | None:
    """Returns whether an installed framework is built for GPUs; None: only it could tell."""
    if backend == "jax":
        return any(map(_is_there, _JAX_CUDA)) or None  # perhaps the user's own build, or AMD's
    if backend == "torch":
        version = _version("torch") or ""
        return False if version.endswith("+cpu") else None
    return False if _version("tensorflow-cpu") and not _version("tensorflow") else None


def _without(is_tpu: bool) -> Finding:
    if is_tpu:
        said = "JAX drives all of them in one process a machine."
        return Finding("devices", "ok", "TPUs", said)
    said = "A job computes on the CPU. If there is a GPU, look for its driver."
    return Finding("devices", "ok", "no GPU", said)


def _devices(seen: Sequence[gpus.Gpu]) -> Finding:
    found = f"{len(seen)} x {seen[0].name}"
    kinds = {gpu.name for gpu in seen}
    if len(kinds) > 1:
        found = ", ".join(sorted(kinds))
        said = "GPUs of several kinds: all wait for the slowest. Choose by CUDA_VISIBLE_DEVICES."
        return Finding("devices", "warning", found, said)
    return Finding("devices", "ok", found, "One replica on each.")


def _nvidia() -> Iterator[Finding]:
    with gpus.opened_nvml() as nvml:
        yield _driver(nvml)
        yield from _memory(nvml)
    yield from of_links(gpu_links())


def _driver(nvml: Any) -> Finding:
    driver = nvml.nvmlSystemGetDriverVersion()
    cuda = nvml.nvmlSystemGetCudaDriverVersion_v2()
    nccl = next((f"NCCL {version}" for name in _NCCL if (version := _version(name))), None)
    found = f"driver {driver}, for CUDA up to {cuda // 1000}.{cuda % 1000 // 10}"
    said = "The framework's CUDA must not be newer."
    return Finding("GPU driver", "ok", f"{found}, {nccl or 'NCCL of the framework'}", said)


def _memory(nvml: Any) -> Iterator[Finding]:
    busy: list[str] = []
    for index, handle in gpus.handles(nvml):
        try:
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        except nvml.NVMLError:  # the GPU shares the machine's memory
            continue
        if memory.used > _BUSY * memory.total:
            busy.append(f"GPU {index}: {size(memory.used)} of {size(memory.total)} are used")
    if busy:
        said = (
            "Another process computes there: a job may run out of memory, and is slow. End it "
            "(nvidia-smi shows it), or leave the GPU out by CUDA_VISIBLE_DEVICES."
        )
        yield Finding("GPU memory", "warning", "; ".join(busy), said)
    else:
        yield Finding("GPU memory", "ok", "free on all GPUs", "No other process uses them.")


def of_links(found: Sequence[GpuLinks]) -> Iterator[Finding]:
    """Yields findings about the links between GPUs."""
    if not found:
        return
    narrow = [
        f"GPU {index}: x{gpu.pcie_width} of x{gpu.pcie_max_width}"
        for index, gpu in enumerate(found)
        if gpu.pcie_width and gpu.pcie_max_width and gpu.pcie_width < gpu.pcie_max_width
    ]
    if narrow:
        said = "Input, and gradients without NVLink, are slow. Look at the slot and the riser."
        yield Finding("PCIe", "warning", "; ".join(narrow), said)
    if len(found) == 1:
        return
    numbers = sorted({gpu.nvlinks for gpu in found})
    if numbers == [0]:
        rate = found[0].pcie_rate
        shown = "" if rate is None else f", {size(rate)}/s a direction"
        said = "Gradients travel by PCIe: large models scale worse than with NVLink."
        yield Finding("links", "ok", f"PCIe without NVLink{shown}", said)
    elif len(numbers) > 1:
        shown = ", ".join(f"GPU {index}: {gpu.nvlinks}" for index, gpu in enumerate(found))
        said = "All wait for the GPU with the fewest. An NVLink may be broken: nvidia-smi nvlink -s"
        yield Finding("links", "warning", f"NVLinks that are active: {shown}", said)
    else:
        said = "Gradients travel by NVLink."
        yield Finding("links", "ok", f"{numbers[0]} NVLinks on each GPU", said)


def _is_there(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
