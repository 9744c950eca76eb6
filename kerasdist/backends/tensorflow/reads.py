"""Which Keras variables a function reads.

A gradient tape does not tell: it hears nothing of what is read for ``ops.stop_gradient``.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from kerasdist import keras_seam


class _Open(threading.local):
    """The sets of variables, by id, that the calling thread's reads are noted in."""

    def __init__(self) -> None:
        self.sets: list[set[int]] = []


_open = _Open()


@contextmanager
def noted() -> Iterator[set[int]]:
    """Notes the Keras variables that this thread reads inside.

    Yields:
        The set of their ids.
    """
    _install()
    read: set[int] = set()
    _open.sets.append(read)
    try:
        yield read
    finally:
        _open.sets.remove(read)


@cache
def _install() -> None:
    keras_seam.install_reads(_note)


def _note(variable: Any) -> None:
    for read in _open.sets:
        read.add(id(variable))
