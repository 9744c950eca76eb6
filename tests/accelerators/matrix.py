"""What runs on accelerators: named configurations for 1, 2 and 8 GPUs and for a pod, as data.

`tests.accelerators.on_gpu` runs those that a machine has devices for, each in at most eight
minutes. No framework is imported here.
"""

from collections.abc import Iterator
from dataclasses import dataclass

BACKENDS = ("torch", "jax", "tensorflow")


@dataclass(frozen=True)
class Row:
    name: str  # backend, devices and part: what ``--only`` selects
    devices: int  # of a pod, those of all hosts together
    backend: str
    command: str  # Python's arguments; ``{device}``: the kind of device, ``{hosts}``: of a pod
    shows: str

    @property
    def is_on_a_pod(self) -> bool:
        return "{hosts}" in self.command


EXACT = {
    "losses": "losses. metrics. step_logs.",
    "optimizers": "optimizers. normalization. ragged. random. passes. offload.",
    "data": "data. own_data. few_rows. lookups.",
    "models": "models. layers. steps. end_of_a_step. overrides. python_state. copies. strategies. "
    "outside_replicas. reading. cost. sharding.",
    "training": "training. callbacks. saving. telemetry. async_checkpoint. checkpoints.",
    "restarts": "restarts. calls. products. generated. newer_keras. executions.",
    "checks": "bad_input. from_outside. check.",
}
"""The themes of the exactness suite, by part: each theme is in one."""

_SMOKE = "benchmarks/gpu_smoke.py --device {device} --backends"


def _on_one(backend: str) -> Iterator[tuple[str, str, str]]:
    smoke = f"{_SMOKE} {backend} --parts"
    yield "numbers", f"{smoke} correctness.*", "plain Keras's numbers, to 1e-4; in 16 bits to 3e-2"
    yield "speed", f"{smoke} speed.*", "`over plain` at most 1.01 in the large models"
    if backend == "torch":
        yield "workers", f"{smoke} workers.*", "a group of one is NCCL's; two share a GPU by Gloo"
    yield from _exact(backend)


def _on_two(backend: str) -> Iterator[tuple[str, str, str]]:
    yield "test", f"-m kerasdist test --backend {backend} --workers 2", "one device's weights"
    yield from _exact(backend)
    cases = f"-m tests.multiprocess {backend} --layout"
    same = "on each worker plain Keras's numbers"
    yield "workers", f"{cases} 2x1 workers. ragged. shards. normalization.", same
    if backend != "tensorflow":
        sharded = f"{cases} 2x1-full sharded_state. sharded_models. optimizers.acc"
        yield "full", sharded, "the same with all state sharded; gathers by groups"


def _on_eight(backend: str) -> Iterator[tuple[str, str, str]]:
    yield "test", f"-m kerasdist test --backend {backend} --workers 8", "one device's weights"
    bench = f"-m kerasdist bench --backend {backend} --workers 1,8 --timeout 200"
    yield "bench", bench, "efficiency and bandwidth beside what `kerasdist plan` says"
    few = f"-m tests.conformance.runner {backend} ragged. normalization. random."
    yield "exact", few, "batches of fewer examples than replicas, to plain Keras's numbers"
    if backend != "tensorflow":
        sharded = f"-m tests.multiprocess {backend} --layout 8x1-full sharded_models."
        yield "full", sharded, "all state sharded over eight workers; gathers by groups"


def _on_a_pod(backend: str) -> Iterator[tuple[str, str, str]]:
    test = f"-m kerasdist test --backend {backend} --hosts {{hosts}}"
    yield "test", test, "one device's weights; bandwidth between hosts as `plan` counts on"
    bench = f"-m kerasdist bench --backend {backend} --hosts {{hosts}} --timeout 200"
    yield "bench", bench, "efficiency beside what `kerasdist plan` says"


def _exact(backend: str) -> Iterator[tuple[str, str, str]]:
    shows = "history, weights and predictions of plain Keras on one such device"
    for part, themes in EXACT.items():
        yield f"exact.{part}", f"-m tests.conformance.runner {backend} {themes}", shows
    yield "facade", f"-m tests.facade {backend}", "custom loops give what one device gives"
    if backend == "jax":
        yield "sharded", "-m tests.sharded jax", "plain Keras's numbers with sharded state"


_PARTS = {"1": (1, _on_one), "2": (2, _on_two), "8": (8, _on_eight), "pod": (16, _on_a_pod)}

ROWS = tuple(
    Row(f"{backend}.{where}.{part}", devices, backend, command, shows)
    for where, (devices, parts) in _PARTS.items()
    for backend in BACKENDS
    for part, command, shows in parts(backend)
)
"""All configurations, in the order in which they run."""
