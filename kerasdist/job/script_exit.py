"""Finds out with which exit code a script ends, so that the other workers learn of a failure.

Python passes an uncaught error to `sys.excepthook`, but a `SystemExit` to no hook. It does read
the exception's `code`, and no Python frame calls it when it does. A subclass of `SystemExit` sees
by this that it ends the script.
"""

from __future__ import annotations

import builtins
import sys
from dataclasses import dataclass
from typing import Any, NoReturn, final

from kerasdist.job.exit_codes import ExitCode

# After a backup that all workers made together, the others stop too, without an error.
_NO_FAILURES = (0, ExitCode.PREEMPTED)

# What the last uncaught exception said; a script ends once.
_said: list[Any] = []


@final
@dataclass(frozen=True)
class Failure:
    """How a script says that it has failed.

    Attributes:
        code: The exit code.
        why: The same in words.
    """

    code: int
    why: str


@final
class ScriptExit(SystemExit):
    """A `SystemExit` that knows whether it ends the script."""

    @property
    def code(self) -> Any:
        """What ``sys.exit`` was given."""
        if sys._getframe().f_back is None:
            _said[:] = self.args[:1]
        return self.args[0] if self.args else None


def listen() -> None:
    """Has ``sys.exit``, ``exit`` and ``quit`` raise a `ScriptExit`."""
    for module, name in ((sys, "exit"), (builtins, "exit"), (builtins, "quit")):
        setattr(module, name, _exit)


def note(error: SystemExit) -> None:
    """Has an exception become a `ScriptExit`, if it is a plain ``raise SystemExit(...)``.

    Args:
        error: An exception on its way.
    """
    if type(error) is SystemExit:
        raise ScriptExit(error.code) from error


def failure() -> Failure | None:
    """Returns how the script has failed by its own account, None if it has not."""
    said = _said[0] if _said else None
    if isinstance(said, int):
        return None if said in _NO_FAILURES else Failure(said, f"exit code {said}")
    return None if said is None else Failure(1, f"exit code 1: {said}")


def _exit(code: Any = None, /) -> NoReturn:
    """Ends the script, as ``sys.exit`` does."""
    raise ScriptExit(code)
