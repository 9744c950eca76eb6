"""What a strategy of one device costs, and what replicas that share a device and a lock cost."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from alternating import median, ratio
from networks import DECODER, TASKS, Task

ROUNDS = {"gpu": 5, "cpu": 2}  # on a CPU it is to run, not to be measured
MOST_STEPS = 100
THREADS = (2, 4)


def _compiled(task: Task, scope: Any) -> Any:
    with scope:
        model = task.model()
        model.compile("adam", task.loss())
    return model


def _fit(task: Task, scope: Any) -> Callable[[], None]:
    return _epochs(task, _compiled(task, scope))


def _epochs(task: Task, model: Any) -> Callable[[], None]:
    x, y = task.data()

    def epoch() -> None:
        model.fit(x, y, batch_size=task.batch, shuffle=False, verbose=0)

    epoch()
    epoch()
    return epoch


def _times(
    works: dict[str, Callable[[], None]], steps: int, kind: str
) -> dict[str, dict[str, list[float]]]:
    """Lets the works take turns; returns milliseconds a step, and those of the main thread alone.

    The main thread's are what Python and launching cost; a step takes longer where it waits.
    """
    found = {name: {"wall": [], "host": []} for name in works}
    for _ in range(ROUNDS[kind]):
        for name, work in works.items():
            wall, host = time.perf_counter(), time.thread_time()
            work()
            found[name]["wall"].append((time.perf_counter() - wall) * 1e3 / steps)
            found[name]["host"].append((time.thread_time() - host) * 1e3 / steps)
    return found


def _overhead(name: str, kind: str) -> dict[str, Any]:
    """A step of `fit` under strategies of one device, over plain Keras's."""
    import keras

    import kerasdist as kd

    if kind == "gpu" and name != "tiny":
        keras.config.set_dtype_policy("mixed_bfloat16")
    task = replace(TASKS[name], steps=min(TASKS[name].steps, MOST_STEPS))
    works = {
        "plain": _fit(task, nullcontext()),
        "one device": _fit(task, kd.OneDeviceStrategy(f"{kind}:0").scope()),
        "mirrored": _fit(task, kd.MirroredStrategy([f"{kind}:0"]).scope()),
    }
    return {"dtype": keras.config.dtype_policy().name, **_compared(works, task.steps, kind)}


def _compared(works: dict[str, Callable[[], None]], steps: int, kind: str) -> dict[str, Any]:
    """Returns what a step of each takes, and what that is over plain Keras's."""
    times = _times(works, steps, kind)
    plain = times["plain"]["wall"]
    return {
        "ms": _rounded({label: median(one["wall"]) for label, one in times.items()}),
        "main thread ms": _rounded({label: median(one["host"]) for label, one in times.items()}),
        "over plain": _rounded({label: ratio(one["wall"], plain) for label, one in times.items()}),
        **_on_the_device(works, steps, kind),
    }


def _on_the_device(works: dict[str, Callable[[], None]], steps: int, kind: str) -> dict[str, Any]:
    """Returns what torch's profiler counts on a GPU in a step: its time, launches and waits."""
    import keras

    if kind != "gpu" or keras.backend.backend() != "torch":
        return {}
    import torch

    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    found = {}
    for label, work in works.items():
        with torch.profiler.profile(activities=activities) as profile:
            work()
            torch.cuda.synchronize()
        events = profile.key_averages()
        counts = {
            name: sum(one.count for one in events if one.key == name) / steps
            for name in ("cudaLaunchKernel", "cudaStreamSynchronize", "cudaMemcpyAsync")
        }
        busy = sum(one.self_device_time_total for one in events) / 1e3 / steps
        found[label] = _rounded({"device ms": busy, **counts})
    return {"a step on the device": found}


def _decoder(kind: str) -> dict[str, Any]:
    """98 million weights in bfloat16: plain `fit`, `fit` under a strategy, and a loop by hand."""
    import keras

    import kerasdist as kd
    from kerasdist.callbacks.telemetry import flops_of

    if kind == "gpu":  # a CPU takes minutes for a step in bfloat16
        keras.config.set_dtype_policy("mixed_bfloat16")
    task = DECODER if kind == "gpu" else replace(DECODER, batch=1, steps=1)
    strategy = kd.MirroredStrategy([f"{kind}:0"])
    works: dict[str, Callable[[], Any]] = {}
    memory: dict[str, float] = {}
    with _bytes_noted(memory, "plain", kind):
        works["plain"] = _fit(task, nullcontext())
    with _bytes_noted(memory, "mirrored", kind):
        model = _compiled(task, strategy.scope())
        works["mirrored"] = _epochs(task, model)
    with _bytes_noted(memory, "by hand", kind):
        works["by hand"] = _by_hand(task, kind)
    figures = {**_compared(works, task.steps, kind), "GB": _rounded(memory)}
    flops = flops_of(model, strategy.replica_set)
    if flops.per_sample is None or flops.peak is None:  # a chip that is in no table
        return figures
    rate = flops.per_sample * task.batch / figures["ms"]["mirrored"] * 1e3
    return {**figures, **_rounded({"TFLOP/s": rate / 1e12, "MFU": rate / flops.peak})}


@contextmanager
def _bytes_noted(memory: dict[str, float], name: str, kind: str) -> Iterator[None]:
    """Notes the GB of the device that the code inside took at most, beside what was held before."""
    held, before = _device_bytes(kind)
    yield
    _, most = _device_bytes(kind)
    memory[name] = (most - held) / 1e9 if most > before else float("nan")


def _by_hand(task: Task, kind: str) -> Callable[[], Any]:
    import keras

    if keras.backend.backend() == "torch":
        from loops.with_torch import on_one_device

        work = on_one_device(task, kind)
    else:
        from loops.with_jax import on_all_devices

        work = on_all_devices(task)
    work()
    work()
    return work


def _device_bytes(kind: str) -> tuple[int, int]:
    """Returns the bytes of the device that are held, and the most that ever were."""
    import keras

    if kind != "gpu":
        return 0, 0
    if keras.backend.backend() == "torch":
        import torch

        return torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
    import jax

    found = jax.local_devices()[0].memory_stats()
    return found["bytes_in_use"], found["peak_bytes_in_use"]


def _threads(kind: str) -> dict[str, Any]:
    """A tiny step in threads that share one device: the price of Python's lock."""
    import kerasdist as kd

    if kind == "gpu":
        _share_the_first_gpu()
    task = TASKS["tiny"]
    works = {"1": _fit(task, nullcontext())}
    for count in THREADS:
        devices = [f"{kind}:{index}" for index in range(count)]
        works[str(count)] = _fit(task, kd.MirroredStrategy(devices).scope())
    times = _times(works, task.steps, kind)
    return {"ms by replicas": _rounded({name: median(one["wall"]) for name, one in times.items()})}


def _share_the_first_gpu() -> None:
    """Lets every GPU that a strategy names be the first one."""
    import torch

    from kerasdist.backends.torch import backend
    from kerasdist.backends.torch.replica import placing
    from kerasdist.core.devices import Device

    def devices(kind: str) -> tuple[Device, ...]:
        return tuple(Device(kind, index) for index in range(max(THREADS)))

    first = {"torch_device": lambda _: torch.device("cuda", 0), "keras_name": lambda _: "cuda:0"}
    for name, module in list(sys.modules.items()):
        if name.startswith("kerasdist.backends.torch"):
            for function, replaced in first.items():
                if vars(module).get(function) is getattr(placing, function):
                    setattr(module, function, replaced)
    backend.BACKEND.devices = devices  # type: ignore[method-assign]


def _rounded(figures: dict[str, float]) -> dict[str, float]:
    return {name: float(np.round(figure, 3)) for name, figure in figures.items()}


PARTS: dict[str, Callable[[str], dict[str, Any]]] = {
    **{f"speed.{name}": partial(_overhead, name) for name in ("tiny", "cnn", "transformer")}
}
BESIDE_A_LOOP: dict[str, Callable[[str], dict[str, Any]]] = {"speed.decoder": _decoder}
OF_TORCH: dict[str, Callable[[str], dict[str, Any]]] = {"speed.threads": _threads}
