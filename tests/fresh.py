"""Runs Python in a fresh interpreter: a framework fixes its devices, and Keras its framework.

What is imported there is what the code imports; or that and Keras, in a process that is forked.
"""

import atexit
import contextlib
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.environment import QUIET, ROOT, values
from tests.multiprocess.forks import Nursery, report

SECONDS = 900


def run_fresh(code: str, *, seconds: float = SECONDS, **environment: str) -> str:
    """Return what `code` prints; fail with its whole output if it fails."""
    return run_python("-c", code, seconds=seconds, **environment)


def run_python(*arguments: str | Path, seconds: float = SECONDS, **environment: str) -> str:
    """Return what ``python *arguments`` prints; fail with its whole output if it fails."""
    settings = {**values(QUIET), **environment}
    child = ended([sys.executable, *arguments], seconds=seconds, **settings)
    assert child.returncode == 0, f"exit status {child.returncode}\n{child.stdout}{child.stderr}"
    return child.stdout


def ended(
    command: Sequence[str | Path],
    *,
    folder: Path = ROOT,
    text: str = "",
    seconds: float = 90,
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """Runs a command in a folder to its end; `text` is what it reads."""
    return subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **environment},
        input=text,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )


BECOMES = """
import sys
import keras
from tests.multiprocess.forks import wait_to_be_one

wait_to_be_one()
exec(sys.argv[1])
"""
_open = contextlib.ExitStack()
_waiting: dict[str, Nursery] = {}
atexit.register(_open.close)


def run_forked(code: str, backend: str, **environment: str) -> str:
    """Return what `code` prints, errors too, in a fork of a process that has imported Keras alone.

    Not for code that settles something before a framework is imported.
    """
    [output] = run_forks(code, backend, [environment])
    return output


def run_forks(code: str, backend: str, environments: Sequence[Mapping[str, str]]) -> list[str]:
    """As `run_forked`, in several forks at once."""
    if backend not in _waiting:
        nursery = Nursery("-c", BECOMES, KERAS_BACKEND=backend, **values(QUIET))
        _waiting[backend] = _open.enter_context(nursery)
    ended = _waiting[backend].begin([code], environments).join(SECONDS)
    assert all(one.code == 0 for one in ended), report(ended)
    return [one.output for one in ended]
