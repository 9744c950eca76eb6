"""`make gpu`: the configurations of `matrix.py` that this machine has accelerators for.

    python -m tests.accelerators.on_gpu [--list] [--only 'torch.1.*' jax.1.speed] [--device cpu]

Any Python that has the frameworks will do. Each part runs by itself, for at most eight minutes, and
leaves a log; none stops the others. A backend that is missing or sees no GPU is left out, and a
line says so. `--device cpu` runs them on CPU devices.
"""

import argparse
import fnmatch
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.accelerators.matrix import ROWS, Row
from tests.conformance.registry import SUITES_ON
from tests.environment import CPU_DEVICES, ROOT, values

SMOKE = "benchmarks/gpu_smoke.py"
SECONDS = 480.0
SHOWN_LINES = 30


def environment(kind: str) -> dict[str, str]:
    """That of this process, in which kerasdist is found without having been installed."""
    paths = (str(ROOT), os.environ.get("PYTHONPATH"))
    found = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return found | values(CPU_DEVICES) if kind == "cpu" else found


def probe(backend: str, kind: str) -> dict[str, Any]:
    """What `gpu_smoke.py` says of the devices that a backend sees here; prints it."""
    command = [sys.executable, SMOKE, "--backends", backend, "--parts", "device", "--device", kind]
    ended = subprocess.run(
        command, cwd=ROOT, env=environment(kind), stdout=subprocess.PIPE, text=True, check=False
    )
    line = json.loads(ended.stdout)
    print(f"{backend}: {line.get('skipped') or line}", flush=True)
    return line


def devices(line: Mapping[str, Any], kind: str) -> int:
    seen = len(line.get("devices", ()))
    # Any number of CPU devices can be prepared.
    return max(row.devices for row in ROWS) if kind == "cpu" and seen else seen


def left_out(row: Row, seen: int, hosts: str | None) -> str | None:
    """Why a part cannot run here; None: it can."""
    if not seen:
        return f"{row.backend} has no device here"
    if row.is_on_a_pod:
        return None if hosts else "it needs a pod: --hosts h1:4,h2:4"
    return None if seen >= row.devices else f"it needs {row.devices} devices, there are {seen}"


def run(row: Row, kind: str, hosts: str | None, log: Path) -> str | None:
    """Runs a part; returns what went wrong, or None."""
    command = [sys.executable, *shlex.split(row.command.format(device=kind, hosts=hosts))]
    begin = time.perf_counter()
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment(kind) | {SUITES_ON: f"{kind}:{row.devices}"},
            stdout=file,
            stderr=file,
            start_new_session=True,  # so that what it starts can be ended with it
        )
        try:
            status = process.wait(SECONDS)
            wrong = f"exit status {status}" if status else None
        except subprocess.TimeoutExpired:
            wrong = f"took more than {SECONDS:.0f} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    seconds = time.perf_counter() - begin
    print(f"{wrong or 'good'}: {row.name}, {seconds:.0f} s, {log}", flush=True)
    return wrong


def chosen(patterns: Sequence[str]) -> list[Row]:
    return [row for row in ROWS if any(fnmatch.fnmatch(row.name, one) for one in patterns)]


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="print the parts and run none")
    parser.add_argument("--only", nargs="+", default=["*"], help="names, or patterns with *")
    parser.add_argument("--device", choices=("gpu", "cpu"), default="gpu")
    parser.add_argument("--hosts", help="of a pod, as for kerasdist run")
    parser.add_argument("--logs", type=Path, default=ROOT / "build" / "gpu", help="a folder")
    options = parser.parse_args(given)
    rows = chosen(options.only)
    if not rows:
        parser.error(f"Expected parts that --list prints. Received: --only {options.only}.")
    if options.list:
        for row in rows:
            print(f"{row.name} ({row.devices}): python {row.command}\n    {row.shows}")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `run` ends what it started
    options.logs.mkdir(parents=True, exist_ok=True)
    probes = {name: probe(name, options.device) for name in {row.backend: 0 for row in rows}}
    failed, ran = {}, 0
    for row in rows:
        log = options.logs / f"{row.name}.log"
        seen = devices(probes[row.backend], options.device)
        if reason := left_out(row, seen, options.hosts):
            print(f"left out: {row.name}: {reason}", flush=True)
            continue
        ran += 1
        if wrong := run(row, options.device, options.hosts, log):
            failed[row.name] = (wrong, log)
    for name, (wrong, log) in failed.items():
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        print(f"\n===== {name}: {wrong} =====", *lines[-SHOWN_LINES:], sep="\n")
    print(f"{ran} parts ran, {len(failed)} failed.")
    return int(bool(failed) or not all(line["ok"] for line in probes.values()))


if __name__ == "__main__":
    sys.exit(main())
