"""A worker of ``kerasdist.launch``: it calls the function whose pickle is in a folder.

Worker 0 leaves there what the function returned, and each what it raised.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import pickle
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from kerasdist.cluster.kerasdist_variables import RANK

CALL, RESULT = "call", "result"


@final
@dataclass(frozen=True)
class Failure:
    """What a worker's function has raised.

    Attributes:
        error: The error; None: it cannot be pickled.
        trace: Its traceback.
    """

    error: Exception | None
    trace: str


def pickler() -> Any:
    """Returns the module that pickles: cloudpickle, which can do functions of a notebook."""
    found = importlib.util.find_spec("cloudpickle") is not None
    return importlib.import_module("cloudpickle") if found else pickle


def read_failure(folder: Path, rank: int) -> Failure | None:
    """Returns what a worker's function has raised, None if nothing."""
    trace, error = _failure_files(folder, rank)
    if not trace.exists():
        return None
    raised = None
    with contextlib.suppress(Exception):  # not every error can be unpickled
        raised = pickle.loads(error.read_bytes())
    return Failure(raised, trace.read_text(encoding="utf-8"))


def _failure_files(folder: Path, rank: int) -> tuple[Path, Path]:
    return folder / f"trace-{rank}", folder / f"error-{rank}"


def _main(folder: Path, rank: int) -> None:
    try:
        fn, args = pickle.loads((folder / CALL).read_bytes())
        value = fn(*args)
        if rank == 0:
            (folder / RESULT).write_bytes(pickler().dumps(value))
    except Exception as error:
        trace, pickled = _failure_files(folder, rank)
        with contextlib.suppress(Exception):
            pickled.write_bytes(pickler().dumps(error))
        trace.write_text("".join(traceback.format_exception(error)), encoding="utf-8")
        raise


if __name__ == "__main__":
    _main(Path(sys.argv[1]), int(os.environ[RANK]))
