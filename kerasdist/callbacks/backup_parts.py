"""The parts of a backup: each worker's file with what it holds of the divided variables.

A part is a file of the format of `backup_file`. The chief's file, which is written last, names the
parts with their sizes and digests. So a backup exists once the chief's file does, and parts that no
chief's file names are of no use.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, final

import numpy as np

from kerasdist.backends.base.pieces import HeldPiece, Region
from kerasdist.callbacks import backup_file
from kerasdist.callbacks.backup_file import Backup, StoredFile, Unread, Written, dtype_of
from kerasdist.errors import BackupError

_NAME = re.compile(r"backup-(\d{12})-[0-9a-f]+-part(\d+)\.kdb")
_PARTS = "parts"


def write(
    folder: Path,
    number: int,
    run: str,
    rank: int,
    pieces: Mapping[int, Sequence[HeldPiece]],
    *,
    mode: int = backup_file.PRIVATE,
) -> dict[str, Any]:
    """Writes a worker's part of a backup; returns what the chief's file has to say of it.

    Args:
        folder: The folder of the backups.
        number: The backup's number.
        run: Hexadecimal digits that no other run has, so that no part is ever replaced.
        rank: The worker's number.
        pieces: What this worker holds, by the number of the variable.
        mode: The file's permissions.
    """
    listed = [(variable, one) for variable, held in pieces.items() for one in held]
    places = [[variable, *_place(one.region)] for variable, one in listed]
    arrays = [
        Unread(dtype_of(one.dtype), (one.region.rows, one.region.end - one.region.begin), one.read)
        for _, one in listed
    ]
    path = folder / f"backup-{number:012d}-{run}-part{rank}.kdb"
    return asdict(backup_file.write_file(path, Backup({"pieces": places}, arrays), mode))


def _place(region: Region) -> tuple[int, int, int]:
    return region.rows, region.begin, region.end


def naming(facts: Mapping[str, Any], parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the facts of a chief's file that names these parts."""
    return {**facts, _PARTS: list(parts)}


def named(facts: Mapping[str, Any]) -> list[Written]:
    """Returns the parts that a chief's file names, by rank of the worker that wrote them."""
    return [Written(**one) for one in facts.get(_PARTS, ())]


def require_whole(folder: Path, parts: Iterable[Written]) -> None:
    """Refuses parts that are missing, or whose bytes are not those that were written."""
    for part in parts:
        with _complaining_of(part):
            backup_file.require_whole(folder / part.name, part)


@contextmanager
def _complaining_of(part: Written) -> Generator[None]:
    try:
        yield
    except BackupError as error:
        raise BackupError(f"of its part {part.name}, {error}") from error
    except OSError as error:
        raise BackupError(f"its part {part.name} cannot be read: {error}") from error


def remove_orphans(folder: Path, up_to: int | None = None) -> None:
    """Removes the parts that no chief's file names.

    Args:
        folder: The folder of the backups.
        up_to: Leaves the parts of backups with a larger number, which workers may be writing.
    """
    parts = [(match, path) for path in folder.glob("backup-*") if (match := _of(path))]
    if not parts:
        return
    kept: set[str] = set()
    unknown: set[int] = set()
    for path in backup_file.newest_first(folder):
        try:
            kept.update(one.name for one in named(StoredFile(path).facts))
        except (BackupError, OSError, KeyError, TypeError):  # torn, or of another version
            unknown.add(backup_file.number_of(path))
    backup_file.remove(
        path
        for match, path in parts
        if path.name not in kept
        and int(match[1]) not in unknown
        and (up_to is None or int(match[1]) <= up_to)
    )


def _of(path: Path) -> re.Match[str] | None:
    return _NAME.fullmatch(path.name)


@final
class StoredVariables:
    """The variables of a backup, in the chief's file and in its parts."""

    def __init__(self, chiefs: StoredFile) -> None:
        """Reads the headers of the parts."""
        self.chiefs = chiefs
        self._pieces: dict[int, list[tuple[Region, StoredFile, int]]] = {}
        for part in named(chiefs.facts):
            with _complaining_of(part):
                file = StoredFile(chiefs.path.with_name(part.name))
            for index, (variable, *place) in enumerate(file.facts["pieces"]):
                found = self._pieces.setdefault(variable, [])
                found.append((Region(*place), file, index))
        for variable, form in enumerate(chiefs.forms):
            if form is None:
                self._require_all(variable)

    @property
    def numbers(self) -> range:
        """The numbers of the arrays in the chief's file, of which variables come first."""
        return range(len(self.chiefs.forms))

    def whole(self, variable: int) -> np.ndarray[Any, Any]:
        """Reads a variable."""
        held = self._pieces.get(variable)
        if held is None:
            return self.chiefs.array(variable)
        rows = held[0][0].rows
        return self._joined(variable, Region(rows, 0, self._size(variable) // rows)).reshape(
            self._shape(variable)
        )

    def part(self, variable: int, region: Region) -> np.ndarray[Any, Any]:
        """Reads a region of a variable, and no more of it where the files allow that."""
        held = self._pieces.get(variable)
        if held is None:
            return self.chiefs.columns(variable, region)
        if all(one.rows == region.rows for one, _, _ in held):
            return self._joined(variable, region)
        value = self.whole(variable).reshape(region.rows, -1)
        return value[:, region.begin : region.end].copy()

    def _joined(self, variable: int, region: Region) -> np.ndarray[Any, Any]:
        """Reads a region that is laid out in as many rows as the pieces in the files."""
        held = self._pieces[variable]
        _, file, index = held[0]
        dtype = dtype_of(file.forms[index][0])
        joined = np.empty((region.rows, region.end - region.begin), dtype)
        for own, file, index in held:
            begin, end = max(own.begin, region.begin), min(own.end, region.end)
            if begin < end:
                columns = Region(region.rows, begin - own.begin, end - own.begin)
                joined[:, begin - region.begin : end - region.begin] = file.columns(index, columns)
        return joined

    def _require_all(self, variable: int) -> None:
        """Refuses parts that together are not the whole variable."""
        regions = sorted((one for one, _, _ in self._pieces.get(variable, ())), key=_place)
        ends = [0, *(one.end for one in regions)]
        joined = all(one.begin == end for one, end in zip(regions, ends, strict=False))
        joined = joined and len({one.rows for one in regions}) == 1
        if not joined or sum(one.size for one in regions) != self._size(variable):
            raise BackupError(f"its parts are not the whole of variable {variable}: {regions}")

    def _shape(self, variable: int) -> Sequence[int]:
        return self.chiefs.facts["forms"][f"variable {variable}"][0]

    def _size(self, variable: int) -> int:
        return int(np.prod(self._shape(variable), dtype=np.int64))
