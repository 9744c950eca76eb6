"""A worker's process: it calls the function whose pickle is in a folder.

It leaves there the pickle of the function's result, or the text of its error.
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
    """An error that a worker's function raised.

    Attributes:
        error: Its type and message.
        trace: Its traceback.
    """

    error: str
    trace: str


@final
@dataclass(frozen=True)
class Answer:
    """The outcome of a worker's function.

    Attributes:
        value: The pickle of what it returned; None if it did not return.
        failure: What it raised; None if it raised nothing.
    """

    value: bytes | None = None
    failure: Failure | None = None


def write_call(folder: Path, call: bytes) -> None:
    """Writes the pickle of a function and its arguments for a worker's process."""
    (folder / _CALL).write_bytes(call)


def read_answer(folder: Path) -> Answer:
    """Returns the result of the call that was written to a folder."""
    value, failure = folder / _VALUE, folder / _FAILURE
    return Answer(
        value.read_bytes() if value.exists() else None,
        Failure(**json.loads(failure.read_bytes())) if failure.exists() else None,
    )


def run(folder: Path) -> None:
    """Calls the function whose pickle is in a folder."""
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
