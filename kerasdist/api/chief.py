"""What one worker of a job does for all of them: the chief, worker 0."""

from __future__ import annotations

import builtins
from functools import cache
from typing import Any

from kerasdist.cluster import detection
from kerasdist.errors import KerasdistError
from kerasdist.job.job import current_job


def is_chief() -> bool:
    """Returns whether this process is the chief of its job, or is alone.

    Before the job is joined, the environment says which worker this is.
    """
    job = current_job()
    return _is_chief_by_environment() if job is None else job.is_chief


@cache
def _is_chief_by_environment() -> bool:
    try:
        resolver = detection.detect()
    except KerasdistError:  # a strategy will raise it
        return True
    return resolver is None or resolver.membership().is_chief


def print(*values: Any, **options: Any) -> None:
    r"""Prints on the chief alone, so that a job prints a line once.

    In a single process it is Python's ``print``. The values are computed on every worker: one that
    needs all workers, such as ``model.evaluate(...)``, may be among them. In a function that
    `Strategy.run` calls, each replica of the chief prints.

    Example::

        history = model.fit(x, y)
        kd.print("final loss:", history.history["loss"][-1])

    Args:
        *values: What to print.
        **options: The options of Python's ``print``: `sep`, `end`, `file` and `flush`.
    """
    if is_chief():
        builtins.print(*values, **options)  # noqa: T201 - it is what this function is for
