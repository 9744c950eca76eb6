"""What a worker tells the launcher (progress, results); the launcher's environment variables.

The launcher imports this file without Keras, so nothing here may import Keras.
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
"""The environment variable with the file descriptor of the pipe to which a worker writes reports.

The launcher sets this variable.
"""


@final
class Channel:
    """Writes reports to the launcher's pipe as lines of JSON; drops reports if the pipe is full."""

    def __init__(self, descriptor: int) -> None:
        os.set_inheritable(descriptor, False)  # processes of a data loader must not inherit it
        os.set_blocking(descriptor, False)
        self._descriptor = descriptor

    def tell(self, report: Mapping[str, object]) -> None:
        """Sends a report, unless it is too long, or the launcher has ended or does not read."""
        line = f"{json.dumps(report)}\n".encode()
        if len(line) > select.PIPE_BUF:  # a full pipe might take only a part of a longer line
            return
        with contextlib.suppress(OSError):
            os.write(self._descriptor, line)


@cache
def channel() -> Channel | None:
    """Returns the channel to the launcher, or None if the launcher wants no reports."""
    given = os.environ.get(STATUS_FD, "")
    if not given.isdecimal():
        return None
    try:
        return Channel(int(given))
    except OSError:  # a worker has started this process, which did not inherit the worker's pipe
        return None


JOINED_FILE = "KERASDIST_JOINED_FILE"
"""The environment variable with the path of the file that a worker makes when it joins its job.

The process that supervises the worker sets this variable.
"""


def tell_launcher() -> None:
    """Makes an empty file, by which the launcher sees that this process has joined the job."""
    path = os.environ.get(JOINED_FILE)
    if path:
        # The job must go on even if the launcher has ended.
        with contextlib.suppress(OSError):
            Path(path).touch()


MEMORY = "KERASDIST_MEMORY"
"""The environment variable with the folder for data that outlives the workers of a job.

The folder is in each host's memory. Workers that are started again read the data there.
"""

BENCH = "KERASDIST_BENCH"
"""The environment variable that is set in the workers of `kerasdist bench`."""

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
    """The measured time of an all-reduce, which sums an array over all replicas.

    Attributes:
        bytes: The size of the array, in bytes.
        seconds: How long a sum takes, as the median of several sums.
        replicas: How many replicas take part.
    """

    bytes: int
    seconds: float
    replicas: int

    @property
    def bus_bandwidth(self) -> float:
        """Bytes per second that each device sends, counted as in NCCL's tests.

        Each of ``n`` devices is counted as sending ``2 (n - 1) / n`` of the array, which is the
        least that an all-reduce needs.
        """
        return 2 * (self.replicas - 1) / self.replicas * self.bytes / self.seconds


PROFILED = "KERASDIST_PROFILE"
PROFILE_FOLDER = "KERASDIST_PROFILE_DIR"

_FORM = re.compile(r"(\d+):(\d+)")


@final
@dataclass(frozen=True)
class ProfiledSteps:
    """The steps of `fit` that shall be profiled.

    Attributes:
        first: How many steps come before the profiled steps; at least 1, because the first step
            compiles.
        last: The number of the last profiled step, from 1.
        folder: The folder for the traces.
    """

    first: int
    last: int
    folder: Path

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables that pass these steps to a worker."""
        return {PROFILED: f"{self.first}:{self.last}", PROFILE_FOLDER: str(self.folder.absolute())}

    def of_worker(self, rank: int) -> Path:
        """Returns the file for a worker's trace."""
        return self.folder / f"worker-{rank}.trace.json.gz"


def parsed(text: str, folder: Path) -> ProfiledSteps:
    """Returns the steps that a text of the form ``first:last``, such as ``10:20``, describes.

    Raises:
        ValueError: If the text has another form.
    """
    match = _FORM.fullmatch(text)
    if match is None or not 0 < int(match[1]) < int(match[2]):
        raise ValueError(
            "expected FIRST:LAST, two numbers of steps from 1, the second larger, "
            f"received {text!r}"
        )
    return ProfiledSteps(int(match[1]), int(match[2]), folder)


def wanted(environ: Mapping[str, str] = os.environ) -> ProfiledSteps | None:
    """Returns the steps that this worker shall profile; None if there are none."""
    text = environ.get(PROFILED)
    return parsed(text, Path(environ.get(PROFILE_FOLDER, "."))) if text else None
