"""What a worker's process does.

A folder holds the pickle of a function and of what it gets. The pickle of what the function
returns, or the text of what it raises, is left there.
"""

from __future__ import annotations

import json
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from ray import cloudpickle

_CALL, _VALUE, _FAILURE = "call", "value", "failure.json"


@final
@dataclass(frozen=True)
class Failure:
    """What a worker's function has raised.

    Attributes:
        error: Its type and message.
        trace: Its traceback.
    """

    error: str
    trace: str


@final
@dataclass(frozen=True)
class Answer:
    """What a worker's function has come to.

    Attributes:
        value: The pickle of what it returned; None if it did not return.
        failure: What it raised; None if it raised nothing.
    """

    value: bytes | None = None
    failure: Failure | None = None


def write_call(folder: Path, call: bytes) -> None:
    """Leaves a call for a worker's process.

    Args:
        folder: Where.
        call: The pickle of a function, its arguments, and its arguments by name.
    """
    (folder / _CALL).write_bytes(call)


def read_answer(folder: Path) -> Answer:
    """Returns what has come of a call.

    Args:
        folder: Where it was left.
    """
    value, failure = folder / _VALUE, folder / _FAILURE
    return Answer(
        value.read_bytes() if value.exists() else None,
        Failure(**json.loads(failure.read_bytes())) if failure.exists() else None,
    )


def run(folder: Path) -> None:
    """Calls the function that was left in a folder.

    Args:
        folder: The folder.
    """
    try:
        fn, args, kwargs = _loaded(folder)
        value = cloudpickle.dumps(fn(*args, **kwargs))
    except Exception as error:
        failure = {"error": f"{type(error).__qualname__}: {error}", "trace": traceback.format_exc()}
        (folder / _FAILURE).write_text(json.dumps(failure), encoding="utf-8")
        raise  # kerasdist tells the other workers, and Python ends with exit code 1
    (folder / _VALUE).write_bytes(value)


def _loaded(folder: Path) -> tuple[Any, Any, Any]:
    # To load it imports the function's module, and perhaps Keras: not before the environment is
    # the worker's, and so in this process.
    return cloudpickle.loads((folder / _CALL).read_bytes())
