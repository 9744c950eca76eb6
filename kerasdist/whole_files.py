"""Files that are complete or absent: written under another name, then renamed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

_unfinished: set[str] = set()


@contextmanager
def replacing(path: Path) -> Generator[str]:
    """Yields a temporary name in the same folder; the file replaces `path` in one step."""
    path = Path(os.path.realpath(path))  # the file behind a link, not the link, is replaced
    # Keras chooses the format by the end of the name.
    unfinished = path.with_name(f"unfinished-{os.getpid()}-{path.name}")
    _unfinished.add(str(unfinished))
    try:
        yield str(unfinished)
        unfinished.replace(path)
    finally:
        _unfinished.discard(str(unfinished))
        if unfinished.is_dir():
            shutil.rmtree(unfinished)
        else:
            unfinished.unlink(missing_ok=True)


def is_unfinished(path: str) -> bool:
    """Returns whether `replacing` is writing to this path."""
    return path in _unfinished
