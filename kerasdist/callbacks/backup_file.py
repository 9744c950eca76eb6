"""Backups on disk: a file is complete or absent.

A file is a line that identifies it, the length of a JSON header, the header, the bytes of the
arrays, and a SHA-256 over all of that. It is written under another name, flushed to the disk, and
then renamed, which replaces a file at once or not at all.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import ml_dtypes
import numpy as np

from kerasdist import whole_files
from kerasdist.errors import BackupError

_MAGIC = b"kerasdist backup 2\n"
_LENGTH_BYTES = 8
_DIGEST_BYTES = hashlib.sha256().digest_size
_NAME = re.compile(r"backup-(\d{12})\.kdb")
_UNFINISHED = ".unfinished"


@final
@dataclass(frozen=True, eq=False)
class Backup:
    """What a file holds.

    Attributes:
        facts: What JSON can say.
        arrays: NumPy arrays.
    """

    facts: Mapping[str, Any]
    arrays: Sequence[np.ndarray[Any, Any]]


def write(folder: Path, number: int, backup: Backup) -> Path:
    """Writes a backup."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"backup-{number:012d}.kdb"
    unfinished = path.with_suffix(f".{os.getpid()}{_UNFINISHED}")
    digest = hashlib.sha256()
    try:
        with unfinished.open("wb") as file:
            for part in _parts(backup):
                digest.update(part)
                file.write(part)
            file.write(digest.digest())
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    whole_files.flush(folder)
    return path


def read(path: Path) -> Backup:
    """Reads a backup."""
    content = path.read_bytes()
    if not content.startswith(_MAGIC):
        found = content[: len(_MAGIC)]
        raise BackupError(
            f"it begins with {found!r}, not {_MAGIC!r}: of another version of kerasdist, or no "
            "backup"
        )
    body, digest = content[:-_DIGEST_BYTES], content[-_DIGEST_BYTES:]
    if hashlib.sha256(body).digest() != digest:
        raise BackupError(f"its {len(content)} bytes are not those that were written: it is torn")
    begin = len(_MAGIC) + _LENGTH_BYTES
    end = begin + int.from_bytes(body[len(_MAGIC) : begin], "big")
    header = json.loads(body[begin:end])
    return Backup(header["facts"], list(_arrays(header["arrays"], memoryview(body)[end:])))


def newest_first(folder: Path) -> list[Path]:
    """Returns the backups of a folder."""
    if not folder.is_dir():
        return []
    return sorted((one for one in folder.iterdir() if _NAME.fullmatch(one.name)), reverse=True)


def remove(paths: Sequence[Path]) -> None:
    """Removes backups."""
    for path in paths:
        path.unlink(missing_ok=True)


def remove_unfinished(folder: Path) -> None:
    """Removes the files of a process that was killed while it wrote."""
    remove(list(folder.glob(f"backup-*{_UNFINISHED}")))


def number_of(path: Path) -> int:
    """Returns a backup's number."""
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match.group(1))


def _parts(backup: Backup) -> Iterator[bytes]:
    arrays = [np.asarray(array, order="C") for array in backup.arrays]
    forms = [[array.dtype.name, list(array.shape)] for array in arrays]
    header = json.dumps({"facts": backup.facts, "arrays": forms}).encode()
    yield _MAGIC
    yield len(header).to_bytes(_LENGTH_BYTES, "big")
    yield header
    for array in arrays:
        yield array.tobytes()


def _arrays(forms: Sequence[Any], data: memoryview) -> Iterator[np.ndarray[Any, Any]]:
    begin = 0
    for name, shape in forms:
        dtype = dtype_of(name)
        size = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        yield np.frombuffer(data[begin : begin + size], dtype).reshape(shape)
        begin += size


def dtype_of(name: str) -> np.dtype[Any]:
    """Returns NumPy's type of a name; bfloat16 and float8 come from ml_dtypes."""
    try:
        return np.dtype(name)
    except TypeError:
        return np.dtype(getattr(ml_dtypes, name))
