"""The live view: what the launcher keeps of the workers, how it draws it, how reports come."""

import contextlib
import io
import json
import os
import threading
import time
from pathlib import Path

import pytest
from rich.console import Console

from kerasdist.cli.launch import live
from kerasdist.cli.launch.live import Board
from kerasdist.cli.launch.placement import Slot
from kerasdist.cli.launch.worker import Pump, Screen
from kerasdist.job.launcher import Channel

REPORT = {
    "workers": 2,
    "epoch": 1,
    "epochs": 3,
    "step": 5,
    "steps": 20,
    "phase": "training",
    "loss": 0.123456,
    "samples_per_s": 1234.5,
    "step_ms": 40.0,
    "own_ms": 12.5,
    "data_ms": 1.0,
    "memory": {"bytes": 300 * 2**20, "peak_bytes": 2**30},
    "gpus": [],
}


def _write(file, lines):
    with os.fdopen(file, "wb") as opened:
        opened.write(lines)


@pytest.mark.parametrize("kind", ["log", "screen"])
def test_a_full_disk_blocks_no_worker(kind):
    """All that a worker writes is read, though no line finds room."""
    device = Path("/dev/full")
    with device.open("w", encoding="utf-8") as full, device.open("wb", buffering=0) as log:
        pump = Pump(Screen(), "[worker 0/1]", 0, log if kind == "log" else None)
        reads, writes = os.pipe()
        pump.start(os.fdopen(reads, "rb"), full)
        lines = b"".join(b"line %d\n" % number for number in range(50_000))
        worker = threading.Thread(target=_write, args=(writes, lines), daemon=True)
        worker.start()
        worker.join(30)
        assert not worker.is_alive()
        assert pump.last_lines(time.monotonic() + 30)[-1] == "line 49999"
        with contextlib.suppress(OSError):
            full.close()


def test_a_full_disk_takes_no_state():
    board_of({}, {}).write(Path("/dev/full/logs"))


def board_of(*changes, hosts=(None, None)):
    slots = [Slot(host, rank, rank, len(hosts)) for rank, host in enumerate(hosts)]
    board = Board()
    board.begin_attempt(0, slots)
    for rank, change in enumerate(changes):
        if change is not None:
            board.heard(rank, REPORT | change)
    return board


def drawn(state, rows=10):
    console = Console(file=io.StringIO(), width=120)
    console.print(live.view(state, rows=rows))
    return console.file.getvalue().splitlines()


def test_a_table_of_all_workers():
    state = board_of({}, {"own_ms": 39.0, "step": 6}, hosts=(None, "far")).state()
    head, names, first, second = drawn(state)
    assert head.split(" · ")[:2] == ["2 workers", "1,234 samples/s"]
    assert names.split() == [
        *("worker", "epoch", "step", "loss", "ms/step", "memory", "last", "sign")
    ]
    assert first.split() == ["0", "1/3", "5/20", "0.1235", "40.0", "300", "MiB", "0", "s", "ago"]
    assert second.split()[:4] == ["1", "far", "1/3", "6/20"]
    assert second.rstrip().endswith("slowest: 39.0 ms a step, others 12.5")


def test_gpus_and_what_is_not_known():
    gpus = [{"bytes": 20 * 2**30, "of_bytes": 80 * 2**30, "busy": 0.75}]
    state = board_of({"gpus": gpus, "loss": None, "steps": None}, None).state()
    _, names, first, second = drawn(state)
    assert "GPU" in names
    assert "75% 20.0 GiB" in first
    assert "5/?" in first
    assert second.split() == ["1", "starting"]


def test_utilization_of_devices_whose_peak_is_known():
    """The head says it once; nothing where it is not known."""
    assert "MFU" not in drawn(board_of({"mfu": None}, {"mfu": None}).state())[0]
    head = drawn(board_of({"mfu": 0.4137}, {"mfu": 0.4137}).state())[0]
    assert head.split(" · ")[1:3] == ["1,234 samples/s", "41.4% MFU"]
    apart = board_of({"workers": 1, "mfu": 0.2}, {"workers": 1, "mfu": 0.4})
    assert "MFU" not in drawn(apart.state())[0]


def test_workers_apart_from_each_other_add_up():
    state = board_of({"workers": 1}, {"workers": 1, "own_ms": 500.0}).state()
    assert state["samples_per_s"] == 2469.0
    assert state["slowest"] is None


def test_a_silent_worker_and_one_that_has_ended():
    board = board_of({}, {"phase": "validation"})
    board.ended(0, 41)
    board.heard(0, dict(REPORT))  # was on its way
    state = board.state()
    state["time"] += 90
    _, _, first, second = drawn(state)
    assert first.endswith("exit code 41")
    assert "ago" not in first
    assert "90 s ago" in second
    assert second.rstrip().endswith("validation")
    board.begin_attempt(1, [Slot(None, rank, rank, 2) for rank in range(2)])
    state = board.state()
    assert "restart 1" in drawn(state)[0]
    assert {one["phase"] for one in state["workers"]} == {"starting"}


def test_too_many_workers_for_the_terminal():
    state = board_of(*[{}] * 7, {"own_ms": 90.0}, hosts=[None] * 8).state()
    lines = drawn(state, rows=3)
    assert [line.split()[0] for line in lines[2:]] == ["0", "1", "7", "and"]
    assert lines[-1] == "and 5 more workers"


def test_what_is_no_report_is_passed_over():
    board = board_of({}, {})
    for line in (b"no report", b"3"):
        board.heard(0, live.report_in(line))
    state = board.state()
    assert (state["schema"], state["workers"][0]["loss"]) == (1, REPORT["loss"])


class TestReports:
    def test_a_launcher_that_does_not_read_holds_nobody_up(self):
        read, write = os.pipe()
        channel = Channel(write)
        for _ in range(5000):
            channel.tell(REPORT)
        channel.tell({"long": "x" * 10_000})
        os.set_blocking(read, False)
        lines = os.read(read, 1 << 20).split(b"\n")
        assert lines.pop() == b""
        assert {json.dumps(json.loads(line)) for line in lines} == {json.dumps(REPORT)}
        os.close(read)
        channel.tell(REPORT)  # the launcher is gone
        os.close(write)
