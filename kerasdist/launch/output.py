"""The workers' lines: on this process's output under a prefix, or in files."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from pathlib import Path
from typing import IO, TextIO, final

from rich.console import Console
from rich.text import Text

from kerasdist.launch import supervisor

LAST_LINES = 20
"""How many of a worker's lines are shown again if it fails."""

_COLOURS = (36, 33, 35, 32, 34, 31)
_LONGEST_LINE = 1 << 16

_REPORT = re.compile(re.escape(supervisor.MARK) + rb"(.*)\n")

REDRAW_SECONDS = 10.0
"""How often a line that is drawn again and again, such as a progress bar, is shown unfinished."""


@final
class Screen:
    """This process's output, shared by the workers, a whole line at a time."""

    def __init__(self, *, is_scripts: bool = False) -> None:
        """Makes the screen.

        Args:
            is_scripts: Whether this process prints lines of its own, which must not be broken.
        """
        self._lock = threading.Lock()
        self._is_scripts = is_scripts
        self._console: Console | None = None

    def write(self, prefix: str, line: str, stream: TextIO, rank: int) -> None:
        """Writes a worker's line."""
        if stream.isatty() and not os.environ.get("NO_COLOR"):
            prefix = f"\x1b[{_COLOURS[rank % len(_COLOURS)]}m{prefix}\x1b[0m"
        self._put([f"{prefix} {line}"], stream)

    def say(self, text: str) -> None:
        """Writes the launcher's own message to the error output."""
        self._put([f"[kerasdist] {line}" for line in text.splitlines()], sys.stderr)

    @contextlib.contextmanager
    def above(self, console: Console) -> Generator[None]:
        """Writes what goes to a terminal above the live view that this console shows."""
        self._console = console
        try:
            yield
        finally:
            with self._lock:
                self._console = None

    def _put(self, lines: list[str], stream: TextIO) -> None:
        # A character that the reader's encoding lacks, a reader that is gone, a full disk: none may
        # end this thread, since a worker blocks when its lines are not read.
        code = stream.encoding or "utf-8"
        with self._lock, contextlib.suppress(OSError, ValueError):
            text = "".join(f"{line}\n" for line in lines).encode(code, "backslashreplace")
            if self._console is not None and stream.isatty():
                shown = Text.from_ansi(text.decode(code).rstrip("\n"))
                self._console.print(shown, soft_wrap=True)
                return
            if self._is_scripts and stream in (sys.__stdout__, sys.__stderr__):
                while text:  # not through the stream, which may hold half a line of the script
                    text = text[os.write(stream.fileno(), text) :]
                return
            stream.write(text.decode(code))
            stream.flush()


@final
class LogFile:
    """A worker's own file in the screen's place, for output that its reports come with."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb", buffering=0)

    def write(self, prefix: str, line: str, stream: TextIO, rank: int) -> None:
        """Writes a line."""
        del prefix, stream, rank
        with contextlib.suppress(OSError):  # a full disk
            self._file.write(f"{line}\n".encode())


@final
class Pump:
    """Moves a worker's output, line by line, to the screen, and keeps the last lines.

    Args:
        screen: Where the lines go.
        prefix: What stands before each.
        rank: The worker's number.
        told: Takes the reports that come with the output; None: none do.
    """

    def __init__(
        self,
        screen: Screen | LogFile,
        prefix: str,
        rank: int,
        told: Callable[[bytes], None] | None = None,
    ) -> None:
        self._screen = screen
        self._prefix = prefix
        self._rank = rank
        self._told = told
        self._last: deque[str] = deque(maxlen=LAST_LINES)
        self._threads: list[threading.Thread] = []

    def start(self, source: IO[bytes], stream: TextIO) -> None:
        """Begins to read one of the worker's outputs."""
        thread = threading.Thread(target=self._move, args=(source, stream), daemon=True)
        thread.start()
        self._threads.append(thread)

    def last_lines(self, deadline: float) -> tuple[str, ...]:
        """Returns the last lines, once all have been read."""
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return tuple(self._last)

    def _move(self, source: IO[bytes], stream: TextIO) -> None:
        rest, shown_at = b"", time.monotonic()
        cut_off = b""
        while chunk := os.read(source.fileno(), 1 << 16):
            if self._told is not None:
                chunk, cut_off = self._without_reports(cut_off + chunk)
            *lines, rest = (rest + chunk).replace(b"\r\n", b"\n").split(b"\n")
            if lines:
                shown_at = time.monotonic()
            for line in lines:
                self._put(_as_drawn(line), stream)
            if b"\r" in rest:
                rest = b"\r" + _as_drawn(rest)
                if time.monotonic() - shown_at >= REDRAW_SECONDS:
                    self._put(rest[1:], stream)
                    shown_at = time.monotonic()
            elif len(rest) > _LONGEST_LINE:
                self._put(rest, stream)
                rest = b""
        if rest:
            self._put(_as_drawn(rest), stream)
        source.close()

    def _without_reports(self, chunk: bytes) -> tuple[bytes, bytes]:
        """Passes on the reports in an output; returns the rest, and a report without its end."""
        assert self._told is not None
        for report in _REPORT.findall(chunk):
            self._told(report)
        chunk = _REPORT.sub(b"", chunk)
        begin = chunk.rfind(supervisor.MARK[:1])
        is_cut_off = begin >= 0 and b"\n" not in chunk[begin:]
        return (chunk[:begin], chunk[begin:]) if is_cut_off else (chunk, b"")

    def _put(self, line: bytes, stream: TextIO) -> None:
        text = line.decode(errors="replace")
        self._last.append(text)
        if text == supervisor.APART:
            return  # the launcher reports it once for all workers
        self._screen.write(self._prefix, text, stream, self._rank)


def _as_drawn(line: bytes) -> bytes:
    """Returns what a terminal shows in the end of a line that was drawn several times."""
    drawn = [text.replace(b"\b", b"") for text in line.split(b"\r")]
    return next((text for text in reversed(drawn) if text), b"")


def last_lines_of(path: Path) -> tuple[str, ...]:
    """Returns the end of a log file."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _LONGEST_LINE))
        lines = file.read().decode(errors="replace").splitlines()
    return tuple(lines[-LAST_LINES:])
