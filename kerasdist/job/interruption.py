"""What a worker says when it is interrupted by Ctrl-C: one line, not the stacks of all workers."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path

# Where no line of a user's script is.
_ELSEWHERE = (
    str(Path(__file__).parents[1]),
    sysconfig.get_path("stdlib"),
    sysconfig.get_path("purelib"),
    sysconfig.get_path("platlib"),
    "<",
)


def interrupt_behind(error: BaseException) -> KeyboardInterrupt | None:
    """Returns the interrupt that an error is, or that it has come from; None if there is none.

    Args:
        error: An error that the script did not catch.
    """
    seen: set[int] = set()
    behind: BaseException | None = error
    while behind is not None and id(behind) not in seen:
        if isinstance(behind, KeyboardInterrupt):
            return behind
        seen.add(id(behind))
        behind = behind.__cause__ or behind.__context__
    return None


def described(interrupt: KeyboardInterrupt, error: BaseException) -> str:
    """Returns one line about an interrupt.

    Args:
        interrupt: The interrupt.
        error: With what the script ends: the interrupt, or what a framework made of it.
    """
    said = "interrupted (Ctrl-C)"
    own = [
        frame
        for frame in traceback.extract_tb(interrupt.__traceback__)
        if not frame.filename.startswith(_ELSEWHERE)
    ]
    if own:
        said += f" at {own[-1].filename}:{own[-1].lineno}"
    if error is not interrupt:
        said += f"; then {type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
    return said
