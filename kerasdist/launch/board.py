"""What the launcher knows of the workers: where each is, and when it last gave a sign of life."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

from kerasdist.core import whole_files
from kerasdist.job import stragglers
from kerasdist.launch.placement import Slot

STATUS_FILE = "status.json"

SLOW = 1.1
"""A worker that takes so many times as long as the others is marked."""

_SECONDS_BETWEEN_FILES = 1.0


@final
class Board:
    """The state of a job's workers; several threads write and read it.

    Args:
        slots: Where the workers run.
        folder: Where the state is written as JSON, every second at most; None: nowhere.
    """

    def __init__(self, slots: Sequence[Slot], folder: Path | None = None) -> None:
        self._slots = slots
        self._path = None if folder is None else folder / STATUS_FILE
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._written = -_SECONDS_BETWEEN_FILES
        self._later: threading.Timer | None = None
        self._began = time.time()
        self._attempt = -1
        self._workers: list[dict[str, Any]] = []
        self.begin_attempt()

    def begin_attempt(self) -> None:
        """Forgets the workers of the attempt before."""
        with self._lock:
            self._attempt += 1
            self._workers = [
                {"worker": slot.rank, "host": slot.host, "phase": "starting", "last_sign": None}
                for slot in self._slots
            ]

    def heard(self, rank: int, line: bytes) -> None:
        """Takes a worker's report."""
        try:
            report = json.loads(line)
        except ValueError:  # cut off, at the worker's end
            return
        if not isinstance(report, dict):
            return
        with self._lock:
            if self._workers[rank]["phase"] == "ended":  # the report was late
                report["phase"] = "ended"
            self._workers[rank] |= {**report, "worker": rank, "last_sign": time.time()}
        self.write()

    def ended(self, rank: int, exit_code: int) -> None:
        """Records that a worker has ended."""
        with self._lock:
            self._workers[rank] |= {"phase": "ended", "exit_code": exit_code}
        self.write()

    def state(self) -> dict[str, Any]:
        """Returns the state of the job, as JSON takes it."""
        with self._lock:
            workers = [dict(one) for one in self._workers]
            attempt = self._attempt
        return {
            "schema": 1,
            "time": time.time(),
            "began": self._began,
            "attempt": attempt,
            "samples_per_s": _rate(workers),
            "slowest": _slow(workers),
            "workers": workers,
        }

    def write(self, *, at_last: bool = False) -> None:
        """Writes the state: now, or when a second has gone by since it was written."""
        if self._path is None:
            return
        with self._writing:
            left = self._written + _SECONDS_BETWEEN_FILES - time.monotonic()
            if left > 0 and not at_last:
                if self._later is None:
                    self._later = threading.Timer(left, self._write_later)
                    self._later.daemon = True
                    self._later.start()
                return
            if self._later is not None:
                self._later.cancel()
                self._later = None
            self._written = time.monotonic()
            with contextlib.suppress(OSError):  # a full disk: what comes later may find room
                self._path.parent.mkdir(parents=True, exist_ok=True)
                with whole_files.replacing(self._path, survives=False) as unfinished:
                    text = json.dumps(self.state(), indent=2)
                    Path(unfinished).write_text(f"{text}\n", encoding="utf-8")

    def _write_later(self) -> None:
        with self._writing:
            was_overtaken, self._later = self._later is None, None
        if not was_overtaken:
            self.write()


def _rate(workers: Sequence[dict[str, Any]]) -> float | None:
    """Returns the samples per second of the whole job, None before the first report of them."""
    told = [one for one in workers if one.get("samples_per_s") is not None]
    if not told:
        return None
    if told[0]["workers"] > 1:  # each counts the global batch
        return told[0]["samples_per_s"]
    return sum(one["samples_per_s"] for one in told)


def _slow(workers: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    if any(one.get("workers", 1) < 2 for one in workers):
        return None  # nothing reads it
    found = stragglers.slowest(workers)
    return None if found is None or found["ms"] < SLOW * found["others_ms"] else found
