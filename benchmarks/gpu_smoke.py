"""What one accelerator can show: right numbers, and what a strategy costs on it.

    python benchmarks/gpu_smoke.py [--device gpu] [--backends torch jax] [--parts correctness.mlp]

Each part runs in a process of its own, under a limit, and gives one line of JSON; none stops the
others. `--device cpu` runs all of it anywhere. The exit status is 1 if a part failed. A backend
that is missing or sees no GPU is left out, and a line says so. `smoke/` has the parts.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib.util
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

BACKENDS = ("torch", "jax", "tensorflow")
PART_SECONDS = 900
SHOWN_ERROR = 600

Figures = Mapping[str, Any]


def parts(backend: str) -> dict[str, Callable[[str], Figures]]:
    """Returns the parts of a backend, by name; each takes the kind of device."""
    from smoke import correctness, speed, workers

    of_torch = {**workers.PARTS, **speed.OF_TORCH} if backend == "torch" else {}
    beside_a_loop = speed.BESIDE_A_LOOP if backend != "tensorflow" else {}
    return {**correctness.PARTS, **speed.PARTS, **beside_a_loop, **of_torch}


def attempt(part: Callable[[str], Figures], device: str) -> dict[str, Any]:
    """Returns what a part found, or the error that it raised."""
    begin = time.perf_counter()
    try:
        found = {"ok": True, **part(device)}
    except Exception as error:  # noqa: BLE001  it is the part's result
        traceback.print_exc()
        found = {"ok": False, "error": f"{type(error).__name__}: {error}"[:SHOWN_ERROR]}
    return {**found, "seconds": round(time.perf_counter() - begin, 1)}


def names(backend: str, patterns: Sequence[str]) -> list[str]:
    known = parts(backend)
    return [one for one in known if any(fnmatch.fnmatch(one, pattern) for pattern in patterns)]


def _in_a_process(backend: str, part: str, device: str) -> dict[str, Any]:
    environment = os.environ | {"KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"}
    if device == "cpu":
        environment |= {"CUDA_VISIBLE_DEVICES": "-1", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, __file__, "--child", backend, part, device]
    try:
        ended = subprocess.run(
            command,
            env=environment,
            capture_output=True,
            text=True,
            timeout=PART_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"ok": False, "error": f"it took more than {PART_SECONDS} seconds"}
    try:
        found = json.loads(ended.stdout)
    except json.JSONDecodeError:
        said = ended.stderr[-SHOWN_ERROR:]
        return {"ok": False, "error": f"exit status {ended.returncode}: {said}"}
    if not found["ok"]:
        sys.stderr.write(ended.stderr)
    return found


def _child(backend: str, part: str, device: str) -> None:
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever frameworks print goes to standard error
    answer.write(json.dumps(attempt(parts(backend)[part], device)))
    answer.flush()
    os._exit(0)  # whatever a part has left behind shall not keep us from ending


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command."""
    made = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    made.add_argument("--device", choices=("gpu", "cpu"), default="gpu")
    made.add_argument("--backends", nargs="+", choices=BACKENDS, default=list(BACKENDS))
    made.add_argument("--parts", nargs="+", default=["*"], help="names, or patterns with *")
    return made


def main() -> int:
    """Prints one line of JSON a part."""
    options = parser().parse_args()
    failed = False
    for backend in options.backends:
        if importlib.util.find_spec(backend) is None:
            skipped = {"ok": True, "skipped": f"{backend} is not installed: nothing ran"}
            print(json.dumps({"backend": backend, "part": "device", **skipped}), flush=True)
            continue
        if not (chosen := names(backend, options.parts)):
            parser().error(f"Expected parts of {list(parts(backend))}. Received: {options.parts}.")
        for name in ["device", *(name for name in chosen if name != "device")]:
            line = _in_a_process(backend, name, options.device)
            print(json.dumps({"backend": backend, "part": name, **line}), flush=True)
            if "skipped" in line:
                break
            failed |= not line["ok"]
    return int(failed)


sys.path.insert(0, str(Path(__file__).parent))  # where it is imported by its path

if __name__ == "__main__":
    if len(sys.argv) == 5 and sys.argv[1] == "--child":
        _child(*sys.argv[2:])
    else:
        sys.exit(main())
