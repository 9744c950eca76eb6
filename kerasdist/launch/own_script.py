"""The command that has started this process, to start it again as another worker."""

from __future__ import annotations

import multiprocessing
import sys
import sysconfig
from pathlib import Path

_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib", "scripts"))


def is_child() -> bool:
    """Returns whether multiprocessing has started this process, as data loaders do.

    While such a process imports the script, it has a mark by which multiprocessing itself refuses
    to start others, and does not know its parent yet.
    """
    this = multiprocessing.current_process()
    return multiprocessing.parent_process() is not None or getattr(this, "_inheriting", False)


def command() -> tuple[str, ...]:
    """Returns the command; the caller has found that there is one."""
    words = [sys.executable, *sys.orig_argv[1:]]
    main = sys.modules["__main__"]
    if main.__spec__ is None:  # a script, not a module; it may have left its first folder
        file = str(main.__file__)
        for index, word in enumerate(words[1:], start=1):
            if file == word or file.endswith(f"/{word}"):  # the user typed it relative to a folder
                words[index] = file
                break
    return tuple(words)


def why_not_again() -> str | None:
    """Returns why this process cannot be started again, None if it can."""
    file = getattr(sys.modules["__main__"], "__file__", None)
    if file is None or hasattr(sys, "ps1") or sys.flags.interactive or not Path(file).is_file():
        return "this is a notebook, an interactive interpreter or a program without a file"
    return None


def why_not_unasked() -> str | None:
    """Returns why starting this process again may not be what its user expects; None: it is."""
    file = str(getattr(sys.modules["__main__"], "__file__", ""))
    if file.startswith(_LIBRARIES):
        return f"the program that runs here is not a script of yours, but {file}"
    return None
