"""Which steps of training a profile is to show; the launcher tells the workers."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import final

STEPS = "KERASDIST_PROFILE"
FOLDER = "KERASDIST_PROFILE_DIR"

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
        return {STEPS: f"{self.first}:{self.last}", FOLDER: str(self.folder.absolute())}

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


def wanted(environ: Mapping[str, str] | None = None) -> ProfiledSteps | None:
    """Returns the steps that this worker is to profile, None if none."""
    environ = os.environ if environ is None else environ
    text = environ.get(STEPS)
    return parsed(text, Path(environ.get(FOLDER, "."))) if text else None
