"""The live view: a table of all workers at the bottom of the terminal, below their lines."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Generator, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kerasdist.launch.board import Board

_A_SECOND = 4
"""How often it is drawn in a second."""

SILENT_SECONDS = 60.0
"""A worker that has given no sign of life for so long is marked."""

_BESIDE_WORKERS = 6
"""The lines of the terminal that are not for workers."""


def is_possible() -> bool:
    """Returns whether this process writes to a terminal that can draw."""
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def console() -> Console:
    """Returns the terminal, or what is to be written to as one."""
    return Console(file=sys.stdout, force_terminal=True)


@contextlib.contextmanager
def shown(board: Board, console: Console) -> Generator[None]:
    """Shows a board's state as long as the context is open; the last one stays."""

    def drawn() -> RenderableType:
        return view(board.state(), rows=max(3, console.height - _BESIDE_WORKERS))

    with Live(
        get_renderable=drawn,
        console=console,
        refresh_per_second=_A_SECOND,
        redirect_stdout=False,
        redirect_stderr=False,
    ):
        yield


def view(state: dict[str, Any], *, rows: int) -> RenderableType:
    """Returns the picture of a state of `kerasdist.launch.board.Board`.

    Args:
        state: The state.
        rows: How many workers there is room for. The first ones are shown, and the slowest.
    """
    workers: Sequence[dict[str, Any]] = state["workers"]
    now, slowest = state["time"], state["slowest"]
    marked = None if slowest is None else slowest["worker"]
    has_gpus = any(one.get("gpus") for one in workers)
    table = Table(box=None, pad_edge=False, header_style="dim", expand=False)
    table.add_column("worker")
    for name in ("epoch", "step", "loss", "ms/step", "memory", *(["GPU"] if has_gpus else [])):
        table.add_column(name, justify="right")
    table.add_column("last sign")
    table.add_column("")
    for one in _chosen(workers, marked, rows):
        cells = [_name(one), _epoch(one), _step(one), _number(one.get("loss"), ".4g")]
        cells += [
            _number(one.get("step_ms"), ".1f"),
            _memory(one),
        ]
        cells += [_gpus(one.get("gpus") or [])] if has_gpus else []
        is_slow = one["worker"] == marked
        note = Text(_note(one, slowest if is_slow else None), "yellow")
        table.add_row(*cells, _last_sign(one, now), note, style="bold" if is_slow else "")
    lines: list[RenderableType] = [Text(_head(state), "bold"), table]
    left_out = len(workers) - table.row_count
    if left_out:
        lines.append(Text(f"and {left_out} more workers", "dim"))
    return Group(*lines)


def _head(state: dict[str, Any]) -> str:
    count = len(state["workers"])
    parts = [f"{count} worker{'s'[: count - 1]}"]
    if state["samples_per_s"] is not None:
        parts.append(f"{state['samples_per_s']:,.0f} samples/s")
    parts.append(time.strftime("%H:%M:%S", time.gmtime(state["time"] - state["began"])))
    if state["attempt"]:
        parts.append(f"restart {state['attempt']}")
    return " · ".join(parts)


def _chosen(
    workers: Sequence[dict[str, Any]], marked: int | None, rows: int
) -> list[dict[str, Any]]:
    if len(workers) <= rows:
        return list(workers)
    chosen = list(workers[:rows])
    if marked is not None and marked >= rows:
        chosen[-1] = workers[marked]
    return chosen


def _name(one: dict[str, Any]) -> str:
    return str(one["worker"]) if one["host"] is None else f"{one['worker']} {one['host']}"


def _epoch(one: dict[str, Any]) -> str:
    return f"{one['epoch']}/{one['epochs'] or '?'}" if "epoch" in one else ""


def _step(one: dict[str, Any]) -> str:
    return f"{one['step']}/{one['steps'] or '?'}" if "step" in one else ""


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _memory(one: dict[str, Any]) -> str:
    memory = one.get("memory")
    return "" if memory is None else _bytes(memory["bytes"])


def _bytes(count: float | None) -> str:
    if count is None:
        return ""
    return f"{count / 2**20:.0f} MiB" if count < 2**30 else f"{count / 2**30:.1f} GiB"


def _gpus(gpus: Sequence[dict[str, Any]]) -> str:
    parts: list[str] = []
    for gpu in gpus:
        busy = "" if gpu["busy"] is None else f"{gpu['busy']:.0%} "
        parts.append(f"{busy}{_bytes(gpu['bytes'])}")
    return ", ".join(parts)


def _last_sign(one: dict[str, Any], now: float) -> Text:
    if one["last_sign"] is None or one["phase"] == "ended":
        return Text("")
    seconds = max(0.0, now - one["last_sign"])
    return Text(f"{seconds:.0f} s ago", "red" if seconds > SILENT_SECONDS else "green")


def _note(one: dict[str, Any], slowest: dict[str, Any] | None) -> str:
    if one["phase"] == "ended":
        return "done" if one["exit_code"] == 0 else f"exit code {one['exit_code']}"
    if slowest is None:
        return "" if one["phase"] == "training" else one["phase"]
    waits = " for data" if slowest["by"] == "data_ms" else ""
    return f"slowest: {slowest['ms']:.1f} ms a step{waits}, others {slowest['others_ms']:.1f}"
