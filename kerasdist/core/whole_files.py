"""Writes files under a temporary name and then renames them, so that no file is incomplete."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

_unfinished: set[str] = set()


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Returns whether a path, such as gs:// or hf://, is on storage that cannot rename files."""
    return "://" in os.fspath(path)


@contextmanager
def replacing(path: str | os.PathLike[str], *, survives: bool = True) -> Generator[str]:
    """Yields a temporary path; the file that the block writes there then replaces `path`.

    With `survives` the new file is flushed to the disk before it replaces `path`. So even after a
    power loss, `path` is either the old file or the complete new file. If `path` is on remote
    storage, `path` itself is yielded.
    """
    if is_remote(path):
        name = os.fspath(path)
        _unfinished.add(name)
        try:
            yield name
        finally:
            _unfinished.discard(name)
        return
    path = Path(os.path.realpath(path))  # a link's target is replaced, not the link itself
    # The temporary name ends like `path`, because Keras chooses the format by the extension. The
    # name includes the numbers of the process and the thread, because other processes and threads
    # may write a file for the same `path` at the same time.
    writer = f"{os.getpid()}-{threading.get_native_id()}"
    unfinished = path.with_name(f"unfinished-{writer}-{path.name}")
    _unfinished.add(str(unfinished))
    try:
        yield str(unfinished)
        if survives:
            flush(unfinished)
        unfinished.replace(path)
        if survives:
            flush(path.parent)
    finally:
        _unfinished.discard(str(unfinished))
        if unfinished.is_dir():
            shutil.rmtree(unfinished)
        else:
            unfinished.unlink(missing_ok=True)


def flush(path: Path) -> None:
    """Waits until a file, or the list of files in a folder, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_unfinished(path: str) -> bool:
    """Returns whether `replacing` is writing to this path at the moment."""
    return path in _unfinished
