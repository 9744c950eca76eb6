"""What a function prints by rich."""

import io

from kerasdist.cli.formatting import plain_console


def printed(show, *facts, width=200):
    file = io.StringIO()
    show(*facts, plain_console(file=file, width=width))
    return file.getvalue()
