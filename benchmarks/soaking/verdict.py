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


def differences(expected: Result, found: Result, tolerance: float = 0.0) -> list[str]:
    """Returns every difference; there is no tolerance where the arithmetic is the same."""

    def differs(one: Any, other: Any) -> bool:
        one, other = np.asarray(one), np.asarray(other)
        if one.shape != other.shape or not tolerance or one.dtype.kind not in "f":
            return not np.array_equal(one, other)
        return not np.allclose(other, one, rtol=tolerance, atol=tolerance, equal_nan=True)

    lines = []
    for name in expected.arrays.keys() | found.arrays.keys():
        if name not in found.arrays or name not in expected.arrays:
            lines.append(f"{name}: on one side only")
        elif differs(expected.arrays[name], found.arrays[name]):
            apart = np.max(np.abs(expected.arrays[name] - found.arrays[name]))
            lines.append(f"{name}: differs by up to {apart:g}")
    if expected.epochs != found.epochs:
        lines.append(f"epochs: {found.epochs} instead of {expected.epochs}")
    if differs(*(_numbers(one.lines, tolerance) for one in (expected, found))):
        lines.append(f"CSVLogger: {found.lines} instead of {expected.lines}")
    for name in sorted(expected.history.keys() | found.history.keys()):
        pair = expected.history.get(name, []), found.history.get(name, [])
        if differs(*pair):
            lines.append(f"history of {name}: {pair[1]} instead of {pair[0]}")
    return sorted(lines)


def _numbers(lines: list[str], tolerance: float) -> Any:
    """Returns the numbers in a log, or its lines where they are to be the same."""
    return [list(map(float, line.split(","))) for line in lines[1:]] if tolerance else lines


def steps(found: Result) -> int:
    """Returns how many steps the optimizer has made."""
    return next(int(one) for name, one in found.arrays.items() if name.endswith("/iteration"))


def furthest(expected: Result, found: Result) -> float:
    """Returns how far apart two numbers of both runs are at most."""
    shared = expected.arrays.keys() & found.arrays.keys()
    return max(float(np.max(np.abs(expected.arrays[n] - found.arrays[n]))) for n in shared)
