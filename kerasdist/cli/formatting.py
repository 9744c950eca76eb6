"""Tables, plots and numbers in the form in which the commands show them."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from kerasdist.core.backend_choice import is_installed
from kerasdist.errors import BackendError


def require_matplotlib() -> None:
    """Raises an error if matplotlib, which `--plot` needs, is not installed."""
    if not is_installed("matplotlib"):
        raise BackendError(
            "Expected matplotlib to be installed, which draws the plot. Received: --plot, without "
            "the package. Install it: pip install matplotlib, or leave out --plot."
        )


def plain_console(**options: Any) -> Console:
    """Returns a console that prints brackets unchanged, such as those of ``[fe80::1]``."""
    return Console(markup=False, **options)


def table(title: str, headings: Sequence[str], left: int = 0) -> Table:
    """Returns a table whose first `left` columns hold texts, and the other columns numbers."""
    made = Table(title=title, title_justify="left")
    for index, heading in enumerate(headings):
        justify = "left" if index < left else "right"
        made.add_column(heading, justify=justify, overflow="fold")
    return made


@contextlib.contextmanager
def figure(path: Path, title: str, counts: Sequence[int], x: str, y: str) -> Generator[Any]:
    """Yields the axes of a plot over the number of devices; after the block, saves the plot."""
    from matplotlib.figure import Figure

    drawn: Any = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = drawn.subplots()
    yield axes
    axes.set(xlabel=x, ylabel=y, title=title)
    axes.set_xticks(counts, [f"{count:,}" for count in counts])
    axes.margins(x=0.1)
    axes.legend(loc="best")
    drawn.savefig(path, dpi=100)


def annotate(
    axes: Any, xs: Sequence[float], ys: Sequence[float], texts: Sequence[str], above: int
) -> None:
    """Writes a text above each point of a plot, or below each point if `above` is negative."""
    for *place, text in zip(xs, ys, texts, strict=True):
        axes.annotate(text, place, (0, above), textcoords="offset points", ha="center", fontsize=8)


def milliseconds(seconds: float) -> str:
    """Returns a time in seconds as a text in milliseconds."""
    return f"{seconds * 1e3:.3g} ms"
