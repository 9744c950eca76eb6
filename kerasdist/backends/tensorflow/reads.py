"""Which Keras variables a function reads, and what is to be done before.

A gradient tape does not tell: it hears nothing of what is read for ``ops.stop_gradient``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from kerasdist import keras_seam


class _Open(threading.local):
    """Who hears of the calling thread's reads."""

    def __init__(self) -> None:
        self.listeners: list[Callable[[Any], None]] = []


_open = _Open()


@contextmanager
def noted() -> Iterator[set[int]]:
    """Notes the Keras variables that this thread reads inside.

    Yields:
        The set of their ids.
    """
    read: set[int] = set()
    with preceded(lambda variable: read.add(id(variable))):
        yield read


@contextmanager
def preceded(listener: Callable[[Any], None]) -> Iterator[None]:
    """Calls a function before this thread reads a Keras variable inside.

    Args:
        listener: Takes the variable.
    """
    _install()
    _open.listeners.append(listener)
    try:
        yield
    finally:
        _open.listeners.remove(listener)


@cache
def _install() -> None:
    keras_seam.install_reads(_note)


def _note(variable: Any) -> None:
    for listener in _open.listeners:
        listener(variable)
