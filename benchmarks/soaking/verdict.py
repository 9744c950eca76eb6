"""Whether the run that was interrupted is the run that was not."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Result:
    """What a worker has kept at the end of a run."""

    arrays: Mapping[str, np.ndarray]
    history: Mapping[str, Any]
    epochs: list[int]
    lengths: Mapping[str, float]
    lines: list[str]


def result(folder: Path, rank: int) -> Result:
    with np.load(folder / f"result-{rank}.npz") as file:
        arrays = {name: file[name] for name in file.files}
    facts = json.loads((folder / f"result-{rank}.json").read_text(encoding="utf-8"))
    return Result(arrays, **facts)


def differences(expected: Result, found: Result) -> list[str]:
    """Returns every difference; there is no tolerance, since the arithmetic is the same."""
    lines = []
    for name in expected.arrays.keys() | found.arrays.keys():
        if name not in found.arrays or name not in expected.arrays:
            lines.append(f"{name}: on one side only")
        elif not np.array_equal(expected.arrays[name], found.arrays[name]):
            apart = np.max(np.abs(expected.arrays[name] - found.arrays[name]))
            lines.append(f"{name}: differs by up to {apart:g}")
    if expected.epochs != found.epochs:
        lines.append(f"epochs: {found.epochs} instead of {expected.epochs}")
    if expected.lines != found.lines:
        lines.append(f"CSVLogger: {found.lines} instead of {expected.lines}")
    for name in sorted(expected.history.keys() | found.history.keys()):
        if expected.history.get(name) != found.history.get(name):
            lines.append(
                f"history of {name}: {found.history.get(name)} instead of "
                f"{expected.history.get(name)}"
            )
    return sorted(lines)
