"""Where the workers' lines go: to this process's output under a prefix, or into files."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import IO, TextIO, final

LAST_LINES = 20
"""How many of a worker's lines are shown again if it fails."""

_COLOURS = (36, 33, 35, 32, 34, 31)
_LONGEST_LINE = 1 << 16


@final
class Screen:
    """This process's output, shared by the workers, a whole line at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def write(self, prefix: str, line: str, stream: TextIO, rank: int) -> None:
        """Writes a worker's line.

        Args:
            prefix: What stands before it.
            line: The line, without its end.
            stream: Where to.
            rank: The worker's number, for the colour.
        """
        if stream.isatty() and not os.environ.get("NO_COLOR"):
            prefix = f"\x1b[{_COLOURS[rank % len(_COLOURS)]}m{prefix}\x1b[0m"
        self._put([f"{prefix} {line}"], stream)

    def say(self, text: str) -> None:
        """Writes the launcher's own words, to the error output.

        Args:
            text: What to say; it may have several lines.
        """
        self._put([f"[kerasdist] {line}" for line in text.splitlines()], sys.stderr)

    def _put(self, lines: list[str], stream: TextIO) -> None:
        # What the reader's encoding lacks must stop nobody, nor a reader that has gone away
        # (`| head`): a worker whose lines nobody takes would stand still.
        code = stream.encoding or "utf-8"
        with self._lock, contextlib.suppress(BrokenPipeError, ValueError):
            for line in lines:
                stream.write(line.encode(code, "backslashreplace").decode(code) + "\n")
            stream.flush()


@final
class Pump:
    """Moves a worker's output, line by line, to the screen, and keeps the last lines.

    Args:
        screen: Where the lines go.
        prefix: What stands before each.
        rank: The worker's number.
    """

    def __init__(self, screen: Screen, prefix: str, rank: int) -> None:
        self._screen = screen
        self._prefix = prefix
        self._rank = rank
        self._last: deque[str] = deque(maxlen=LAST_LINES)
        self._threads: list[threading.Thread] = []

    def start(self, source: IO[bytes], stream: TextIO) -> None:
        """Begins to read one of the worker's outputs.

        Args:
            source: The worker's end.
            stream: Ours.
        """
        thread = threading.Thread(target=self._move, args=(source, stream), daemon=True)
        thread.start()
        self._threads.append(thread)

    def last_lines(self, deadline: float) -> tuple[str, ...]:
        """Returns the last lines, once all have been read.

        Args:
            deadline: Until when, by the monotonic clock, to wait for that. A process that has left
                the worker's group may hold the output open for ever.
        """
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return tuple(self._last)

    def _move(self, source: IO[bytes], stream: TextIO) -> None:
        rest = b""
        while chunk := os.read(source.fileno(), 1 << 16):
            # A progress bar ends its lines by a carriage return.
            *lines, rest = (rest + chunk).replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
            if len(rest) > _LONGEST_LINE:
                lines, rest = [*lines, rest], b""
            for line in lines:
                self._put(line, stream)
        if rest:
            self._put(rest, stream)
        source.close()

    def _put(self, line: bytes, stream: TextIO) -> None:
        text = line.decode(errors="replace")
        self._last.append(text)
        self._screen.write(self._prefix, text, stream, self._rank)


def last_lines_of(path: Path) -> tuple[str, ...]:
    """Returns the end of a log file.

    Args:
        path: The file.
    """
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _LONGEST_LINE))
        lines = file.read().decode(errors="replace").splitlines()
    return tuple(lines[-LAST_LINES:])
