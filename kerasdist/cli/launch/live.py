"""Shows the state of the workers, as the launcher knows it, in a file and in a table."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any, final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Column, Table
from rich.text import Text

from kerasdist.cli.launch.placement import Slot
from kerasdist.core import whole_files
from kerasdist.core.user_warnings import plural
from kerasdist.job import comparison

State = dict[str, Any]
"""A JSON object: the report of a worker, or the result of `Board.state`."""

STATUS_FILE = "status.json"

SLOW = 1.1
"""The table marks a worker if its step takes this many times as long as the others' steps."""

SILENT_SECONDS = 60.0
"""The table marks a worker if it has given no sign of life for this many seconds."""

_SECONDS_BETWEEN_FILES = 1.0
_DRAWN_A_SECOND = 4
_BESIDE_WORKERS = 6  # lines of the terminal that do not show workers


@final
class Board:
    """The state of a job's workers: their progress, and when each last gave a sign of life.

    Several threads write and read the state.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._began = time.time()
        self._attempt = 0
        self._workers: list[State] = []

    def begin_attempt(self, number: int, slots: Sequence[Slot]) -> None:
        """Replaces the workers of the last attempt with the workers of this attempt."""
        with self._lock:
            self._attempt = number
            self._workers = [
                {"worker": slot.rank, "host": slot.host, "phase": "starting", "last_sign": None}
                for slot in slots
            ]

    def heard(self, rank: int, report: State) -> None:
        """Adds a worker's report, such as its step and loss, to the state."""
        with self._lock:
            if self._workers[rank]["phase"] == "ended":  # the report arrived late
                report["phase"] = "ended"
            self._workers[rank] |= {**report, "worker": rank, "last_sign": time.time()}

    def ended(self, rank: int, exit_code: int) -> None:
        """Records that a worker has ended."""
        with self._lock:
            self._workers[rank] |= {"phase": "ended", "exit_code": exit_code}

    def state(self) -> State:
        """Returns the state of the job, in the form of the file ``status.json``."""
        with self._lock:
            workers = [dict(one) for one in self._workers]
            attempt = self._attempt
        rates = [one for one in workers if one.get("samples_per_s") is not None]
        # Workers that train one model together all report the rate of the whole job. So the rate of
        # one worker is enough.
        counted = rates[:1] if rates and rates[0]["workers"] > 1 else rates
        is_job = all(one.get("workers", 1) > 1 for one in workers)
        slowest = comparison.slowest(workers) if is_job else None
        is_slow = slowest is not None and slowest["ms"] >= SLOW * slowest["others_ms"]
        return {
            "schema": 1,
            "time": time.time(),
            "began": self._began,
            "attempt": attempt,
            "samples_per_s": sum(one["samples_per_s"] for one in counted) if rates else None,
            # If each worker trains a model of its own, no worker's MFU covers all devices.
            "mfu": counted[0].get("mfu") if len(counted) == 1 else None,
            "slowest": slowest if is_slow else None,
            "workers": workers,
        }

    @contextlib.contextmanager
    def in_file(self, folder: Path) -> Generator[None]:
        """Writes a file with the state once a second inside of the block, and again at its end."""
        is_over = threading.Event()

        def write() -> None:
            self.write(folder)
            while not is_over.wait(_SECONDS_BETWEEN_FILES):
                self.write(folder)

        writing = threading.Thread(target=write, name="kerasdist-board", daemon=True)
        writing.start()
        try:
            yield
        finally:
            is_over.set()
            writing.join()
            self.write(folder)

    def write(self, folder: Path) -> None:
        """Writes the state, as JSON, to a file in a folder."""
        with contextlib.suppress(OSError):  # the disk may be full now, and have space later
            folder.mkdir(parents=True, exist_ok=True)
            with whole_files.replacing(folder / STATUS_FILE, survives=False) as unfinished:
                text = json.dumps(self.state(), indent=2)
                Path(unfinished).write_text(f"{text}\n", encoding="utf-8")


def report_in(line: bytes) -> State:
    """Returns the report in a line; an empty dict if the worker ended in the middle of the line."""
    try:
        report = json.loads(line)
    except ValueError:
        return {}
    return report if isinstance(report, dict) else {}


def is_possible() -> bool:
    """Returns whether standard output is a terminal on which a table can be redrawn."""
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def shown(board: Board) -> Live:
    """Returns a context manager that shows a board's state as a table inside of the block.

    Text that the block writes to `sys.stdout` or `sys.stderr` goes above the table, if that stream
    is a terminal. After the block, the last state stays visible.
    """
    # With `--live on` the table is drawn even if standard output is no terminal. For this case
    # `force_terminal` is set.
    console = Console(file=sys.stdout, force_terminal=True, soft_wrap=True)

    def drawn() -> RenderableType:
        return view(board.state(), rows=max(3, console.height - _BESIDE_WORKERS))

    return Live(
        get_renderable=drawn,
        console=console,
        refresh_per_second=_DRAWN_A_SECOND,
        redirect_stdout=sys.stdout.isatty(),
        redirect_stderr=sys.stderr.isatty(),
    )


def view(state: State, *, rows: int) -> RenderableType:
    """Returns a board's state as a table, with a headline.

    Args:
        state: The board's state.
        rows: The largest number of workers to show. If there are more, the first ones are shown,
            and also the slowest one if it is much slower than the others.
    """
    workers: list[State] = state["workers"]
    slowest: State = state["slowest"] or {}
    marked = slowest.get("worker")
    chosen = workers[:rows]
    if marked is not None and marked >= rows:
        chosen[-1] = workers[marked]
    has_gpus = any(one.get("gpus") for one in workers)
    names = ("epoch", "step", "loss", "ms/step", "memory", *(["GPU"] if has_gpus else []))
    numbers = [Column(name, justify="right") for name in names]
    table = Table("worker", *numbers, "last sign", "", box=None, pad_edge=False, header_style="dim")
    for one in chosen:
        is_slow, memory = one["worker"] == marked, one.get("memory")
        table.add_row(
            str(one["worker"]) if one["host"] is None else f"{one['worker']} {one['host']}",
            _progress(one, "epoch", "epochs"),
            _progress(one, "step", "steps"),
            _number(one.get("loss"), ".4g"),
            _number(one.get("step_ms"), ".1f"),
            _bytes(memory and memory["bytes"]),
            *([", ".join(map(_gpu, one.get("gpus") or []))] if has_gpus else []),
            _last_sign(one, state["time"]),
            Text(_note(one, slowest if is_slow else {}), "yellow"),
            style="bold" if is_slow else "",
        )
    parts = [plural(len(workers), "worker")]
    if state["samples_per_s"] is not None:
        parts.append(f"{state['samples_per_s']:,.0f} samples/s")
    if state["mfu"] is not None:
        parts.append(f"{state['mfu']:.1%} MFU")
    parts.append(time.strftime("%H:%M:%S", time.gmtime(state["time"] - state["began"])))
    if state["attempt"]:
        parts.append(f"restart {state['attempt']}")
    left_out = len(workers) - len(chosen)
    more = [Text(f"and {left_out} more workers", "dim")] if left_out else []
    return Group(Text(" · ".join(parts), "bold"), table, *more)


def _progress(one: State, done: str, of: str) -> str:
    return f"{one[done]}/{one[of] or '?'}" if done in one else ""


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _bytes(count: float | None) -> str:
    if count is None:
        return ""
    return f"{count / 2**20:.0f} MiB" if count < 2**30 else f"{count / 2**30:.1f} GiB"


def _gpu(gpu: State) -> str:
    busy = "" if gpu["busy"] is None else f"{gpu['busy']:.0%} "
    return f"{busy}{_bytes(gpu['bytes'])}"


def _last_sign(one: State, now: float) -> Text:
    if one["last_sign"] is None or one["phase"] == "ended":
        return Text("")
    seconds = max(0.0, now - one["last_sign"])
    return Text(f"{seconds:.0f} s ago", "red" if seconds > SILENT_SECONDS else "green")


def _note(one: State, slowest: State) -> str:
    if one["phase"] == "ended":
        return "done" if one["exit_code"] == 0 else f"exit code {one['exit_code']}"
    if not slowest:
        return "" if one["phase"] == "training" else one["phase"]
    waits = " for data" if slowest["by"] == "data_ms" else ""
    return f"slowest: {slowest['ms']:.1f} ms a step{waits}, others {slowest['others_ms']:.1f}"
