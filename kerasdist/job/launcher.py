"""Between a worker and the launcher: that it has joined, where training is, results, profiles.

The launcher imports it without Keras, so nothing of Keras is imported here.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, final

STATUS_FD = "KERASDIST_STATUS_FD"
"""The number of a pipe that a worker writes its reports to; the launcher sets it."""


@final
class Channel:
    """Writes reports, each a line of JSON, and never waits: a report may be dropped."""

    def __init__(self, descriptor: int) -> None:
        os.set_inheritable(descriptor, False)  # a data loader's processes have no part in it
        os.set_blocking(descriptor, False)
        self._descriptor = descriptor

    def tell(self, report: Mapping[str, object]) -> None:
        """Sends a report, unless the launcher is gone or does not read."""
        line = f"{json.dumps(report)}\n".encode()
        if len(line) > select.PIPE_BUF:  # the pipe may split longer lines
            return
        with contextlib.suppress(OSError):
            os.write(self._descriptor, line)


@cache
def channel() -> Channel | None:
    """Returns the channel to the launcher, None where there is none or it wants no reports."""
    given = os.environ.get(STATUS_FD, "")
    if not given.isdecimal():
        return None
    try:
        return Channel(int(given))
    except OSError:  # a process that the worker has started, without its files
        return None


JOINED_FILE = "KERASDIST_JOINED_FILE"
"""The path of a file that a worker makes; `kerasdist.cli.launch.supervisor` sets it."""


def tell_launcher() -> None:
    """Makes the file that tells the launcher that this process has joined the job."""
    path = os.environ.get(JOINED_FILE)
    if path:
        # A launcher that is gone must not stop the job.
        with contextlib.suppress(OSError):
            Path(path).touch()


MEMORY = "KERASDIST_MEMORY"
"""The folder for what a job keeps in the memory of each host, from one start to the next."""

BENCH = "KERASDIST_BENCH"
"""Set in the workers of a benchmark."""

_MARK = "kerasdist-result: "


def print_result(result: object) -> None:
    """Prints a result for the command that has started this worker."""
    sys.stdout.write(f"\n{_MARK}{json.dumps(result)}\n")
    sys.stdout.flush()


def read_results(lines: Iterable[str]) -> list[Any]:
    """Returns the results among the lines of a worker's output."""
    return [json.loads(line.removeprefix(_MARK)) for line in lines if line.startswith(_MARK)]


@final
@dataclass(frozen=True)
class AllReduce:
    """A sum of one array over all replicas.

    Attributes:
        bytes: Its size.
        seconds: How long a sum takes; the median of several.
        replicas: How many replicas there are.
    """

    bytes: int
    seconds: float
    replicas: int

    @property
    def bus_bandwidth(self) -> float:
        """Bytes a second that each device sends, as NCCL's tests count them.

        In the best all-reduce each device sends ``2 (n - 1) / n`` of the array.
        """
        return 2 * (self.replicas - 1) / self.replicas * self.bytes / self.seconds


PROFILED = "KERASDIST_PROFILE"
PROFILE_FOLDER = "KERASDIST_PROFILE_DIR"

_FORM = re.compile(r"(\d+):(\d+)")


@final
@dataclass(frozen=True)
class ProfiledSteps:
    """Some steps of `fit`.

    Attributes:
        first: How many steps come before them, at least 1: the first one compiles.
        last: How many steps there are up to their end.
        folder: The folder of the traces.
    """

    first: int
    last: int
    folder: Path

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables that tell a worker."""
        return {PROFILED: f"{self.first}:{self.last}", PROFILE_FOLDER: str(self.folder.absolute())}

    def of_worker(self, rank: int) -> Path:
        """Returns the file of a worker's trace."""
        return self.folder / f"worker-{rank}.trace.json.gz"


def parsed(text: str, folder: Path) -> ProfiledSteps:
    """Returns the steps that ``first:last`` says.

    Raises:
        ValueError: If it says none.
    """
    match = _FORM.fullmatch(text)
    if match is None or not 0 < int(match[1]) < int(match[2]):
        raise ValueError(
            "expected FIRST:LAST, two numbers of steps from 1, the second larger, "
            f"received {text!r}"
        )
    return ProfiledSteps(int(match[1]), int(match[2]), folder)


def wanted(environ: Mapping[str, str] = os.environ) -> ProfiledSteps | None:
    """Returns the steps that this worker is to profile, None if none."""
    text = environ.get(PROFILED)
    return parsed(text, Path(environ.get(PROFILE_FOLDER, "."))) if text else None
