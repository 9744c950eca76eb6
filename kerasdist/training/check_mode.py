"""What to do where the first training step is not that of one device."""

from __future__ import annotations

import os
from typing import Any, cast, get_args

from kerasdist.backends.base import Check

CHECK_VARIABLE = "KERASDIST_CHECK"


def check_mode(check: Check | None) -> Check:
    """Returns the argument of a strategy, or what the environment says in its place.

    Args:
        check: The argument; None: the variable ``KERASDIST_CHECK``, and without it ``"warn"``.

    Raises:
        ValueError: If it is none of the choices.
    """
    said: Any = check
    name = "check"
    if said is None:
        said = os.environ.get(CHECK_VARIABLE) or "warn"
        name = CHECK_VARIABLE
    if said not in get_args(Check):
        raise ValueError(
            f"Expected {name} to be one of {list(get_args(Check))}. Received: {name}={said!r}. "
            "Leave it out for a warning."
        )
    return cast("Check", said)
