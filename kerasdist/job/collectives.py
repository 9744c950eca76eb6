"""Records and compares the collectives that workers issue, if ``KERASDIST_DEBUG_COLLECTIVES=1``.

All workers must issue the same collectives in the same order. If a worker issues one collective
while another worker issues a different one, both hang, or silently give wrong numbers. A
backend records each collective just before the collective starts. Workers then compare digests of
what they have recorded.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import final

from kerasdist.core.context import current
from kerasdist.core.user_warnings import LIBRARIES, PACKAGE
from kerasdist.errors import JobError

VARIABLE = "KERASDIST_DEBUG_COLLECTIVES"

STEPS = 50
"""Workers compare their collectives each time they have made this many steps.

They also compare them at the end of each epoch, at the end of each call of `fit`, `evaluate` or
`predict`, and at the end of the script.
"""

# How many of its last collectives a worker reports.
_REPORTED = 3

ADVICE = (
    "All workers must issue the same collectives in the same order. The first collective that "
    "differs is under a condition that is not the same on all workers. For each collective, the "
    "message shows what is sent and how, the function of kerasdist, and the line of your code."
)

# Frameworks generate files of code from user code. One of these texts is in such a file's name.
_GENERATED = ("__autograph_generated", "torchinductor")


def log_if_wanted(environ: Mapping[str, str] = os.environ) -> CollectiveLog | None:
    """Returns a new log if ``KERASDIST_DEBUG_COLLECTIVES=1``; otherwise None.

    Raises:
        JobError: If the variable is neither ``1`` nor ``0``.
    """
    said = environ.get(VARIABLE) or "0"
    if said not in ("0", "1"):
        raise JobError(
            f"Expected the variable {VARIABLE} to be 1 (record and compare all collectives) or 0. "
            f"Received: {VARIABLE}={said!r}."
        )
    return CollectiveLog() if said == "1" else None


@final
class CollectiveLog:
    """The collectives that this worker has issued since workers last compared collectives.

    Attributes:
        taken: How many collectives the workers have already compared.
    """

    def __init__(self) -> None:
        """Makes a log without collectives."""
        self._lock = threading.Lock()
        self.taken = 0
        self._entries: list[str] = []

    def record(self, kind: str, what: str) -> None:
        """Records a collective that is about to start.

        Args:
            kind: The kind of the collective, such as ``all_reduce``.
            what: What the collective sends and to whom, in words that are equal on all workers.
        """
        self.add(described(kind, what))

    def add(self, entry: str) -> None:
        """Records a collective by its description."""
        with self._lock:
            self._entries.append(entry)

    def last(self) -> list[str]:
        """Returns descriptions of the last few recorded collectives, each with its number."""
        with self._lock:
            entries = self._entries[-_REPORTED:]
            first = self.taken + len(self._entries) - len(entries) + 1
        return [f"number {first + index}: {entry}" for index, entry in enumerate(entries)]

    def take(self) -> tuple[int, list[str]]:
        """Removes the recorded collectives from the log, to compare them now.

        Returns how many collectives were compared earlier, and the removed ones.
        """
        with self._lock:
            before, entries = self.taken, self._entries
            self.taken, self._entries = before + len(entries), []
        return before, entries


def described(kind: str, what: str) -> str:
    """Returns the description of a collective, with the code that issues it."""
    return f"{kind} {what}{current.issued_for or code_here()}"


def code_here() -> str:
    """Returns which code issues a collective: a function of kerasdist, and a line of user code."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    assert frame is not None
    recorder = frame.f_code.co_filename
    ours = users = ""
    while frame is not None and not users:
        file = frame.f_code.co_filename
        if file.startswith(PACKAGE):
            if not ours and file != recorder:
                ours = f" by {frame.f_code.co_qualname}"
        elif not file.startswith(("<", *LIBRARIES)) and not any(one in file for one in _GENERATED):
            users = f", {Path(file).name}:{frame.f_lineno}"
        frame = frame.f_back
    return f"{ours}{users}"
