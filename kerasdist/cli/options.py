"""Options that several commands of ``kerasdist`` share, and how an error ends a command."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Generator
from pathlib import Path
from typing import Annotated, Any, Literal, final

import typer
from typer.core import TyperCommand

from kerasdist.errors import KerasdistError

_TYPE = re.compile(r" <[a-z\[\]]+>")
_BRACES = re.compile(r"{([A-Z:]+)}")


@final
class PlainCommand(TyperCommand):
    """A command whose help says ``SCRIPT``, instead of typer's ``{SCRIPT}``."""

    def get_help(self, ctx: Any) -> str:
        """Returns the text of ``--help``, without braces and types."""
        text = _BRACES.sub(r"\1", super().get_help(ctx))
        return _TYPE.sub(lambda found: " " * len(found[0]), text)

    def get_usage(self, ctx: Any) -> str:
        """Returns the usage line, which ``--help`` and error messages show."""
        return _BRACES.sub(r"\1", super().get_usage(ctx))


def option(metavar: str | None, text: str, *names: str, **more: Any) -> Any:
    """Returns typer's description of an option; the help shows the option's value as `metavar`."""
    return typer.Option(*names, metavar=metavar, help=text, **more)


Arguments = Annotated[
    list[str] | None,
    typer.Argument(metavar="ARGUMENTS", help="Passed to the script.", show_default=False),
]
Devices = Annotated[
    int | None, option("N", "Number of CPU devices that each worker prepares.", min=1)
]
Hosts = Annotated[
    str | None, option("HOSTS", "Machines reached by ssh, as in kerasdist run: h1:4,h2:4.")
]
Seconds = Annotated[float, option("SECONDS", "The time after which a job is ended.", min=1.0)]
AsJson = Annotated[bool, option(None, "Print machine-readable JSON.", "--json")]
Plot = Annotated[Path | None, option("FILE", "Draw the scaling, with matplotlib.")]


@contextlib.contextmanager
def showing_errors(exit_code: int) -> Generator[None]:
    """Prints an error of kerasdist or the system as one line, and exits with `exit_code`."""
    try:
        yield
    except (KerasdistError, OSError) as error:
        typer.echo(f"kerasdist: {error}", err=True)
        raise typer.Exit(exit_code) from error


def listed(hosts: str | None) -> tuple[str, ...]:
    """Returns `JobSpec.hosts` for the text of ``--hosts``; empty if the option is absent."""
    return () if hosts is None else (hosts,)


def number_of_workers(text: str | None) -> int | Literal["gpu"] | None:
    """Returns the number of workers in the text of ``--workers``; None if the option is absent."""
    if text is None or text == "gpu":
        return text
    if not text.isdecimal() or int(text) < 1:
        raise typer.BadParameter(
            f"expected a number from 1, or gpu, received {text!r}", param_hint="--workers"
        )
    return int(text)
