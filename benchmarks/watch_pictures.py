"""Draws the pictures of docs/guides/watch-a-job.md from a job of two workers, one of them slow.

The live view of the home page, which moves, is of the same job.

    make pictures

The job runs on PyTorch, on this machine's CPU, for some seconds. The live view is drawn by rich, as
a terminal would show it in the midst of the job; the trace by matplotlib, as Perfetto does.
"""

import gzip
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib import pyplot
from rich.console import Console

from kerasdist.cli.launch import live

ROOT = Path(__file__).parents[1]
GUIDES = ROOT / "docs" / "guides"
RECORDING = ROOT / "docs" / "assets" / "live-view.svg"
SCRIPT = "tests.multiprocess.watched_script"
# Seconds by which the batches of worker 1 are later, and the steps of the profile.
SLOW, STEPS = 0.3, "6:9"
# In the recording: the state is written once a second, so there is a frame of each step.
SLOW_IN_RECORDING, SECONDS_A_FRAME = 1.0, 0.8
STEPS_ROW = "steps of fit"
PRINTED = ("[worker 0/2] a line that worker 0 has printed",)
COMMAND = "kerasdist run --workers 2 train.py"
State = dict[str, Any]
_THREAD = re.compile(r"python: thread \d+ ")


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        states, trace = run(folder, SLOW)
        marked = [state for state in states if state["slowest"]]
        still = live_view(max(marked, key=_least_steps), "live")
        (GUIDES / "watch-live.svg").write_text(still + "\n", encoding="utf-8")
        draw_trace(trace, GUIDES / "watch-trace.png")
    with tempfile.TemporaryDirectory() as name:
        states, _ = run(Path(name), SLOW_IN_RECORDING)
        views = [live_view(state, f"live-{number}") for number, state in enumerate(states)]
        draw_recording(views, RECORDING)


def run(folder: Path, slow: float) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Runs the job; returns its states while it trains, and its trace."""
    command = [
        *(sys.executable, "-m", "kerasdist", "run", "--workers", "2", "--log-dir", str(folder)),
        *("--profile", STEPS, "--profile-dir", str(folder), "-m", SCRIPT, str(slow)),
    ]
    status, found = folder / "status.json", []
    environment = {**os.environ, "KERAS_BACKEND": "torch", "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, cwd=ROOT, env=environment) as job:
        while job.poll() is None:
            time.sleep(0.2)
            state = json.loads(status.read_text(encoding="utf-8")) if status.exists() else None
            if state and _are_training(state) and state not in found:
                found.append(state)
    if job.returncode or not any(state["slowest"] for state in found):
        raise SystemExit(f"the job has ended with {job.returncode}, state {found}")
    with gzip.open(folder / "trace.json.gz") as file:
        return found, json.load(file)["traceEvents"]


def _are_training(state: dict[str, Any]) -> bool:
    return all(one["phase"] == "training" for one in state["workers"])


def _least_steps(state: dict[str, Any]) -> int:
    return min(one["step"] for one in state["workers"])


def live_view(
    state: State, name: str, above: Sequence[str] = PRINTED, command: str = COMMAND
) -> str:
    """The live view as a drawing, whose parts have names that begin with `name`."""
    console = Console(record=True, width=100, force_terminal=True, file=io.StringIO())
    for line in above:
        console.print(line, highlight=False, markup=False)
    console.print(live.view(state, rows=10))
    drawn = console.export_svg(title=command, unique_id=name)
    drawn = re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL)  # from another server
    return "\n".join(line.rstrip() for line in drawn.splitlines())


def draw_recording(frames: Sequence[str], path: Path) -> None:
    """Draws the live view as it changes: one view after the other is seen."""
    # A view may have a line more than another.
    sizes = [re.findall(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', frame)[0] for frame in frames]
    width, height = (max(map(float, each)) for each in zip(*sizes, strict=True))
    total = len(frames) * SECONDS_A_FRAME
    style = (
        f".frame{{visibility:hidden;animation:show {total:g}s step-end infinite}}"
        f"@keyframes show{{0%{{visibility:visible}}{100 / len(frames):g}%{{visibility:hidden}}}}"
        "@media(prefers-reduced-motion){.frame{animation:none}"
        ".frame:last-child{visibility:visible}}"
    )
    groups = [
        f'<g class="frame" style="animation-delay:{number * SECONDS_A_FRAME:g}s">'
        + frame.replace("<svg ", f'<svg width="{own[0]}" height="{own[1]}" ', 1)
        + "</g>"
        for number, (frame, own) in enumerate(zip(frames, sizes, strict=True))
    ]
    box = f'viewBox="0 0 {width:g} {height:g}"'
    start = f'<svg xmlns="http://www.w3.org/2000/svg" {box}><style>{style}</style>'
    path.write_text("\n".join([start, *groups, "</svg>\n"]), encoding="utf-8")


def draw_trace(events: list[dict[str, Any]], path: Path) -> None:
    processes = {one["pid"]: one for one in events if one["name"] == "process_name"}
    threads = {
        (one["pid"], one["tid"]): _THREAD.sub("", one["args"]["name"])
        for one in events
        if one["name"] == "thread_name"
    }
    # Gloo's threads, which take turns, are drawn on one row.
    rows: dict[tuple[int, str], list[dict[str, Any]]] = defaultdict(list)
    for one in events:
        if one["ph"] == "X" and not one["name"].startswith("PyTorch Profiler"):
            rows[one["pid"], threads[one["pid"], one["tid"]]].append(one)
    figure, axes = pyplot.subplots(figsize=(10, 3.6), layout="constrained")
    labels: list[str] = []
    for (worker, thread), drawn in sorted(
        rows.items(), key=lambda row: (row[0][0], "steps" not in row[0][1], row[0][1])
    ):
        for one in drawn:
            draw_event(axes, one, -len(labels), is_step=thread == STEPS_ROW)
        labels.append(f"{processes[worker]['args']['name']}\n{thread}")
    axes.set_yticks([-number for number in range(len(labels))], labels, fontsize=8)
    axes.set_xlabel("ms since the first event, by the chief's clock")
    figure.savefig(path, dpi=110)


def draw_event(axes: Any, event: dict[str, Any], height: int, *, is_step: bool) -> None:
    begin, length = event["ts"] / 1000, event["dur"] / 1000
    waits = "all_reduce" in event["name"] or "allreduce" in event["name"]
    colour = "tab:red" if waits else "lightgrey" if is_step else "tab:blue"
    axes.barh(height, length, left=begin, height=0.7, color=colour, alpha=0.8, linewidth=0)
    if length > 40:
        label = event["name"][:24]
        axes.text(begin + length / 2, height, label, ha="center", va="center", fontsize=6)


if __name__ == "__main__":
    main()
