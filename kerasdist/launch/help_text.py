"""The help of a command, with the arguments as users write them."""

from __future__ import annotations

import re
from typing import Any, final

from typer.core import TyperCommand

_TYPE = re.compile(r" <[a-z\[\]]+>")
_BRACES = re.compile(r"{([A-Z]+)}")


@final
class PlainCommand(TyperCommand):
    """A command whose help says ``SCRIPT``; typer writes ``{SCRIPT}`` and ``SCRIPT <str>``."""

    def get_help(self, ctx: Any) -> str:
        """Returns the whole help."""
        return _TYPE.sub(lambda found: " " * len(found[0]), _named(super().get_help(ctx)))

    def get_usage(self, ctx: Any) -> str:
        """Returns the line of usage, which errors show too."""
        return _named(super().get_usage(ctx))


def _named(text: str) -> str:
    return _BRACES.sub(r"\1", text)
