"""What a function prints by rich."""

import io

from rich.console import Console


def printed(show, *facts, width=200):
    file = io.StringIO()
    show(*facts, Console(file=file, width=width))
    return file.getvalue()
