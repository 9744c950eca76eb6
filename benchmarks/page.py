"""Runs the benchmarks, and writes docs/benchmarks.md from what they print.

    make benchmarks                                            # all of them (45 minutes on 2 cores)
    python -m benchmarks.page --only multiworker --backends jax --tasks tiny mlp  # a part

What a benchmark prints on a backend is kept in benchmarks/recorded, with the machine, the versions
and the day. What is not run again stays as it was recorded.
"""

import argparse
import ast
import importlib.metadata
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

FOLDER = Path(__file__).parent
RECORDED = FOLDER / "recorded"
PAGE = FOLDER.parent / "docs" / "benchmarks.md"
BENCHMARKS = {
    "fit_overhead": "`fit` on several devices of one process",
    "executions": "Several steps in an execution",
    "custom_loop": "A compiled step of a custom loop",
    "multiworker": "Two workers",
    "memory": "Memory of sharded state",
}
BACKENDS = ("tensorflow", "jax", "torch")
ALONE_ON = {"executions": ("jax",), "memory": ("jax", "torch")}
# These have no options: `KERAS_BACKEND` says the backend.
WITHOUT_OPTIONS = ("memory",)
PACKAGES = ("keras", "tensorflow-cpu", "jax", "torch")
INTRODUCTION = """# Benchmarks

`make benchmarks` writes this page. Each table compares programs ("contenders") that train the same
Keras model on the same data. The contenders take turns, so that other work of the machine slows all
of them equally. Compare the ratios, not the times. A ratio "÷ X" is the time of the contender of
the row, divided by the time of contender X; if the ratio is below 1, the contender of the row is
faster. Only the ratios under [Two workers](#two-workers) are ratios of speeds; if such a ratio is
above 1, the contender of the row is faster. The models are in `benchmarks/networks.py`: `tiny`,
whose step is nearly all overhead, an MLP, a small ResNet (`cnn`) and a transformer.

Nothing on this page was measured on GPUs or TPUs. A missing value has not been measured yet.
"""


def main() -> None:
    """Runs the benchmarks that are named, and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=list(BENCHMARKS), choices=BENCHMARKS)
    parser.add_argument("--backends", nargs="+", default=list(BACKENDS), choices=BACKENDS)
    parser.add_argument("--rounds", type=int, default=5, help="of each contender")
    parser.add_argument("--tasks", nargs="+", help="all of the benchmark's without it")
    options = parser.parse_args()
    RECORDED.mkdir(exist_ok=True)
    common = [
        "--rounds",
        str(options.rounds),
        *(("--tasks", *options.tasks) if options.tasks else ()),
    ]
    for name in options.only:
        for backend in options.backends:
            if backend not in ALONE_ON.get(name, BACKENDS):
                continue
            plain = name in WITHOUT_OPTIONS
            own = [] if plain else [*common, "--backends", backend]
            printed = output(name, own, {"KERAS_BACKEND": backend} if plain else {})
            record(name, backend).write_text(f"{machine()}\n\n{printed}", "utf-8")
            PAGE.write_text(page(), "utf-8")


def record(name: str, backend: str) -> Path:
    """Returns the file of what a benchmark has printed on a backend."""
    return RECORDED / f"{name}-{backend}.txt"


def output(name: str, arguments: list[str], variables: dict[str, str]) -> str:
    """Runs a benchmark; returns what it prints."""
    command = [sys.executable, str(FOLDER / f"{name}.py"), *arguments]
    environment = {"COLUMNS": "110", **os.environ, **variables}
    run = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True, env=environment)
    if run.returncode:
        raise SystemExit(f"{name} has ended with {run.returncode}: {run.stdout}")
    return "\n".join(line.rstrip() for line in run.stdout.strip("\n").splitlines()) + "\n"


def machine() -> str:
    """Returns the day, the machine and the versions, on a line."""
    models = Path("/proc/cpuinfo")
    lines = models.read_text("utf-8").splitlines() if models.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    versions = (f"{name} {importlib.metadata.version(name)}" for name in PACKAGES)
    cores = f"{os.cpu_count()} cores of {names[0] if names else platform.processor()}"
    return f"{time.strftime('%Y-%m-%d')}, {cores}, {', '.join(versions)}"


def page() -> str:
    """Returns the page of what is recorded."""
    parts = [INTRODUCTION]
    for name, title in BENCHMARKS.items():
        files = [path for path in (record(name, one) for one in BACKENDS) if path.exists()]
        if not files:
            continue
        about = ast.get_docstring(ast.parse((FOLDER / f"{name}.py").read_text("utf-8"))) or ""
        first, *rest = about.split("\n\n")
        prose = "\n\n".join([first, *(one for one in rest if not one.startswith(" "))])
        command = f"    python benchmarks/{name}.py"
        parts.append(f"## {title}\n\n{prose}\n\n{command}\n")
        for path in files:
            where, _, printed = path.read_text("utf-8").partition("\n\n")
            parts.append(f"{where}:\n\n```text\n{printed}```\n")
    return "\n".join(parts)


if __name__ == "__main__":
    main()
