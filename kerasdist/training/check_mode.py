"""The option that says what to do if the first training step differs from that of one device."""

from __future__ import annotations

import os
from typing import Any, cast, get_args

from kerasdist.backends.options import Check

CHECK_VARIABLE = "KERASDIST_CHECK"


def check_mode(check: Check | None) -> Check:
    """Returns a strategy's argument `check`; if it is None, the environment variable's value."""
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
