"""PyTorch's workers on one device: a group of one, and two processes that share it.

On a GPU a group of one is NCCL's. NCCL refuses two processes on one GPU, so these have Gloo, which
takes tensors of a GPU too.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from smoke.models import EXAMPLES, difference, exact, outcome

MOST = 1e-4
SECONDS = 300
KILLED = 17
NAMES = ("mlp", "cnn", "transformer")


def _plain(name: str) -> dict[str, Any]:
    exact()
    example = EXAMPLES[name]
    return outcome(example.compiled(), *example.data())


def _started(workers: int, what: str, kind: str, folder: str) -> list[tuple[int | None, str]]:
    """Runs `worker.py` in so many processes; returns exit statuses and what they said."""
    from kerasdist.cli.launch.placement import free_port

    common = os.environ | {
        "KERASDIST_COORDINATOR": f"127.0.0.1:{free_port()}",
        "KERASDIST_WORKERS": str(workers),
        "OMP_NUM_THREADS": "1",
    }
    logs = [Path(folder) / f"log-{rank}" for rank in range(workers)]
    command = [sys.executable, str(Path(__file__).with_name("worker.py")), what, kind, folder]
    processes = []
    for rank, log in enumerate(logs):
        with log.open("w") as file:
            environment = common | {"KERASDIST_RANK": str(rank)}
            processes.append(
                subprocess.Popen(command, env=environment, stdout=file, stderr=file, text=True)
            )
    try:
        statuses = [process.wait(SECONDS) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [(status, log.read_text()) for status, log in zip(statuses, logs, strict=True)]


def _outcomes(workers: int, what: str, kind: str) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        for rank, (status, said) in enumerate(_started(workers, what, kind, folder)):
            if status:
                raise RuntimeError(f"Worker {rank} ended with {status}: {said[-400:]}")
        return [dict(np.load(Path(folder) / f"{rank}.npz")) for rank in range(workers)]


def _fit(workers: int) -> Callable[[str], dict[str, Any]]:
    def part(kind: str) -> dict[str, Any]:
        figures = {}
        for name in NAMES:
            plain = _plain(name)
            found = _outcomes(workers, name, kind)
            figures[name] = max(difference(plain, one, MOST) for one in found)
        return {"largest difference": figures}

    return part


def _draws(kind: str) -> dict[str, Any]:
    """Unseeded draws differ by rank, also after the user has set the seed."""
    first, second = (one["kept"] for one in _outcomes(2, "draws", kind))
    alike = float(np.mean(first == second))
    if not alike < 0.9:
        raise AssertionError(f"Expected other masks on each rank. Received: {alike=}.")
    return {"alike": alike, "kept": [float(first.mean()), float(second.mean())]}


def _killed(kind: str) -> dict[str, Any]:
    """A worker that is lost ends the other one, which says who was lost."""
    with tempfile.TemporaryDirectory() as folder:
        (status, said), (lost, _) = _started(2, "killed", kind, folder)
    if lost != KILLED or not status or "worker 1" not in said:
        raise AssertionError(f"Expected worker 1 to be named. Received: {status=}, {said[-400:]}")
    return {"exit status": status}


PARTS: dict[str, Callable[[str], dict[str, Any]]] = {
    "workers.group_of_one": _fit(1),
    "workers.two_on_one_device": _fit(2),
    "workers.draws": _draws,
    "workers.killed": _killed,
}
