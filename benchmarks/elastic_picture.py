"""Draws the picture of docs/guides/when-a-worker-dies.md: a job of 3 workers, then 2, then 4.

    make pictures

Two workers are the launcher's, on PyTorch on this machine's CPU. A third has joined by
``kerasdist join`` when the recording begins, and that machine is lost; then one of two workers
joins. Above the live view are the last lines of the launcher.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.watch_pictures import GUIDES, ROOT, SCRIPT, State, draw_recording, live_view

PICTURE = GUIDES / "when-a-worker-dies.svg"
COMMAND = "kerasdist run --workers 2:4 --join-port 29400 --max-restarts 3 train.py"
SLOW = 0.5  # seconds of a step
FRAMES = 3  # of each size of the job while it trains
SECONDS = 300.0
LINES, MOST = 2, 4
_SHOWN = re.compile(r"\[kerasdist\] (worker \d/\d failed|the job goes on with \d of).*")


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        frames = record(Path(name))
    drawn = []
    for number, (said, state) in enumerate(frames):
        rows = MOST - len(state["workers"])
        above = [*[""] * (rows + LINES - len(said)), *said]
        drawn.append(live_view(state, f"elastic-{number}", above, COMMAND))
    draw_recording(drawn, PICTURE)


def record(folder: Path) -> list[tuple[list[str], State]]:
    """Runs the job; returns its states, each with what the launcher has said last."""
    own = {"KERAS_BACKEND": "torch", "PYTHONPATH": str(ROOT), "KERASDIST_SECRET": "of a picture"}
    environment = {**os.environ, **own, "CUDA_VISIBLE_DEVICES": ""}
    kerasdist = [sys.executable, "-m", "kerasdist"]
    training = ["-m", SCRIPT, str(SLOW), "", str(folder / "backups")]
    job = subprocess.Popen(
        [
            *(*kerasdist, "run", "--workers", "2:4", "--join-port", "0", "--max-restarts", "3"),
            *("--log-dir", str(folder), *training),
        ],
        cwd=ROOT,
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert job.stderr is not None
    [port] = re.findall(r":(\d+)$", job.stderr.readline())
    said: deque[str] = deque(maxlen=LINES)
    frames: list[tuple[list[str], State]] = []

    def read(lines) -> None:
        for line in lines:
            print(line, end="", file=sys.stderr)
            said.extend(_SHOWN.findall(line) and [line.rstrip()])

    def join(workers: int) -> subprocess.Popen[bytes]:
        offer = ("join", "--workers", str(workers), f"127.0.0.1:{port}")
        return subprocess.Popen([*kerasdist, *offer], cwd=ROOT, env=environment)

    def watch(size: int) -> None:
        for state in states(folder / "status.json", size, lambda: job.poll() is not None):
            frames.append((list(said), state))

    threading.Thread(target=read, args=(job.stderr,), daemon=True).start()
    try:
        watch(2)
        lost = join(1)
        watch(3)
        first = next(at for at, (_, state) in enumerate(frames) if len(state["workers"]) == 3)
        lost.kill()
        watch(2)
        join(2)
        watch(4)
    finally:
        job.terminate()
        job.wait()
    is_seen = [_phases(state) for _, state in frames]
    return [
        frames[at]
        for at in range(first, len(frames))
        if is_seen[at][1] == {"training"} or is_seen[at] != is_seen[at - 1]
    ]


def states(path: Path, size: int, is_over: Callable[[], bool]) -> Any:
    """Yields the states until some have been seen in which so many workers train."""
    until, seen, last = time.monotonic() + SECONDS, 0, None
    while seen < FRAMES:
        if is_over() or time.monotonic() > until:
            raise SystemExit(f"expected {size} workers that train, received: {last}")
        time.sleep(0.2)
        state = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
        if state and (last is None or state["time"] != last["time"]):
            last = state
            seen += _phases(state) == (size, {"training"})
            yield state


def _phases(state: State) -> tuple[int, set[str]]:
    return len(state["workers"]), {one["phase"] for one in state["workers"]}


if __name__ == "__main__":
    main()
