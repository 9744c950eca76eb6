"""Backups on disk; a file is either complete or absent.

A file consists of a line that names the format, the length of a JSON header, the header, the bytes
of the arrays, and a SHA-256 over all of that. The file is written under another name, flushed to
the disk, and then renamed, which replaces an older file completely or not at all. Arrays are read,
written and checked one after another, so that they need not all be in memory at once.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, final

import ml_dtypes  # noqa: F401  it makes bfloat16 and float8 known to NumPy
import numpy as np

from kerasdist.core import whole_files
from kerasdist.core.sharding import Region
from kerasdist.errors import BackupError

_MAGIC = b"kerasdist backup 8\n"
_LENGTH_BYTES = 8
_DIGEST_BYTES = hashlib.sha256().digest_size
_CHUNK = 1 << 18
_NAME = re.compile(r"backup-\d{12}\.kdb")
PRIVATE = 0o600


@final
@dataclass(frozen=True)
class Unread:
    """An array that is read from its variable only when it is written to a file.

    So the copies of all arrays are never in memory at the same time.

    Attributes:
        dtype: The NumPy type of the elements.
        shape: The shape of the array.
        read: A function that returns the array.
        path: The path of the array's variable, for error messages.
    """

    dtype: np.dtype
    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]
    path: str = ""


@final
class StoredFile:
    """A file on the disk, from which arrays are read one at a time.

    Attributes:
        path: The path of the file.
        facts: The content of the header, without the forms of the arrays.
        forms: The type and shape of each array; None for an array that is in another file.
    """

    def __init__(self, path: Path) -> None:
        """Reads only the header. To check the whole file, call `require_whole`.

        Raises:
            BackupError: If the header does not have the form in which `write_file` writes headers.
        """
        self.path = path
        with path.open("rb") as file:
            _require_magic(file)
            length = int.from_bytes(file.read(_LENGTH_BYTES), "big")
            text = file.read(min(length, os.fstat(file.fileno()).st_size))
            begin = file.tell()
        try:
            header = json.loads(text)
            self.facts: Mapping[str, Any] = dict(header["facts"])
            self.forms: Sequence[Any] = list(header["arrays"])
            self._begins = list(accumulate(map(bytes_of, self.forms), initial=begin))
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
            raise BackupError("its header is not of the form that kerasdist writes") from error

    def array(self, number: int) -> np.ndarray:
        """Reads an array."""
        _, shape = self.forms[number]
        return self.columns(number, Region.whole(shape)).reshape(shape)

    def columns(self, number: int, region: Region) -> np.ndarray:
        """Reads the columns of `region` from an array that is reshaped to `region.rows` rows."""
        dtype = np.dtype(self.forms[number][0])
        if not region.size:
            return np.zeros((region.rows, region.end - region.begin), dtype)
        data = np.memmap(
            self.path,
            np.uint8,
            mode="r",
            offset=self._begins[number],
            shape=(region.rows, bytes_of(self.forms[number]) // region.rows),
        )
        columns = slice(region.begin * dtype.itemsize, region.end * dtype.itemsize)
        return np.array(data[:, columns], subok=False).view(dtype)


def path_of(folder: Path, number: int, part: str = "") -> Path:
    """Returns the path of a backup, or of one of its parts."""
    return folder / f"backup-{number:012d}{part}.kdb"


def read_bytes(file: BinaryIO) -> Iterator[bytes]:
    """Yields the bytes of a file, in chunks."""
    return iter(lambda: file.read(_CHUNK), b"")


def write_bytes(path: Path, chunks: Iterable[bytes], mode: int = PRIVATE) -> None:
    """Writes the given bytes to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_files.replacing(path) as name, _opened(name, mode) as file:
        file.writelines(chunks)


def write_file(
    path: Path, facts: Mapping[str, object], arrays: Sequence[Any], mode: int = PRIVATE
) -> str:
    """Writes a file and returns its digest. The file is on the disk when this function returns.

    Every array is read, even if the disk is full, because other workers may take part in the reads.

    Args:
        path: The file.
        facts: Facts for the header; they must be values that JSON can represent.
        arrays: NumPy arrays or `Unread` objects; None for an array that is in another file.
        mode: The permissions of the file.
    """
    forms = [None if one is None else [one.dtype.name, list(one.shape)] for one in arrays]
    header = json.dumps({"facts": facts, "arrays": forms}).encode()
    digest = hashlib.sha256()
    left = iter(zip(forms, arrays, strict=True))
    one: object = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_files.replacing(path) as name, _opened(name, mode) as file:
            for part in (_MAGIC, len(header).to_bytes(_LENGTH_BYTES, "big"), header):
                _append(file, part, digest)
            for form, one in left:
                if form is not None:
                    _append(file, _content(one, form), digest)
            file.write(digest.digest())
    except OSError as error:
        place = f", at the variable {one.path!r}" if isinstance(one, Unread) else ""
        read_along(other for _, other in left)
        raise OSError(error.errno, f"{error.strerror}{place}, in", str(path)) from error
    return digest.hexdigest()


def read_along(arrays: Iterable[object]) -> None:
    """Reads arrays without writing them, because other workers take part in the reads."""
    for one in arrays:
        if isinstance(one, Unread):
            one.read()


def read(path: Path) -> StoredFile:
    """Checks a file, and reads its header."""
    require_whole(path)
    return StoredFile(path)


def require_whole(path: Path, known: str | None = None) -> None:
    """Refuses a file whose bytes are not the bytes that were written.

    Args:
        path: The file.
        known: The digest that the chief's file has stored for this file; None if this file is
            the chief's.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        _require_magic(file)
        file.seek(0)
        digest, left = hashlib.sha256(), max(size - _DIGEST_BYTES, 0)
        while chunk := file.read(min(left, _CHUNK)):
            digest.update(chunk)
            left -= len(chunk)
        is_whole = file.read() == digest.digest()
    if not is_whole:
        raise BackupError(f"its {size} bytes are not those that were written: it is torn")
    if known not in (None, digest.hexdigest()):
        raise BackupError("it is a file of another backup")


def newest_first(folder: Path) -> list[Path]:
    """Returns the backups of a folder, the newest first."""
    found = (path for path in folder.glob("backup-*") if _NAME.fullmatch(path.name))
    return sorted(found, reverse=True)


def remove(paths: Iterable[Path]) -> None:
    """Removes files."""
    for path in paths:
        path.unlink(missing_ok=True)


def remove_unfinished(folder: Path) -> None:
    """Removes the files of processes that were killed while they were writing."""
    remove(list(folder.glob("unfinished-*-backup-*")))


def number_of(path: Path) -> int:
    """Returns a backup's number."""
    return int(path.stem.removeprefix("backup-"))


def bytes_of(form: Sequence[Any] | None) -> int:
    """Returns the size of an array in bytes, given its type and shape; 0 for None."""
    if form is None:
        return 0
    name, shape = form
    return np.dtype(name).itemsize * int(np.prod(shape, dtype=np.int64))


def _opened(name: str, mode: int) -> BinaryIO:
    file = os.fdopen(os.open(name, os.O_WRONLY | os.O_CREAT, mode), "wb")
    os.fchmod(file.fileno(), mode)
    return file


def _append(file: BinaryIO, content: Any, digest: Any) -> None:
    digest.update(content)
    file.write(content)


def _content(one: object, form: Sequence[Any]) -> np.ndarray:
    """Returns an array's bytes."""
    array = np.asarray(one.read() if isinstance(one, Unread) else one, order="C")
    if array.dtype.name != form[0] or array.nbytes != bytes_of(form):
        raise ValueError(
            f"Expected an array of the form that the file's header has, {form}. Received: an array "
            f"of {array.dtype.name}, {list(array.shape)}. Change no variable while a backup is "
            "written."
        )
    return array.reshape(-1).view(np.uint8)


def _require_magic(file: BinaryIO) -> None:
    found = file.read(len(_MAGIC))
    if found != _MAGIC:
        raise BackupError(
            f"it begins with {found!r}, not {_MAGIC!r}: it is of another version of kerasdist, or "
            "no backup"
        )
