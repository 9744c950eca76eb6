"""Keras variables: their native variables, their copies, and listeners to their reads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import keras
import tensorflow as tf

from kerasdist import keras_compat
from kerasdist.errors import ScopeError


def native(variable: object) -> Any:
    """Returns the framework's variable in a Keras variable."""
    return variable.value if isinstance(variable, keras.Variable) else variable


def copies(variable: object) -> Sequence[Any]:
    """Returns the components in this process of a variable or of another distributed value."""
    held = native(variable)
    return held.values if isinstance(held, tf.distribute.DistributedValues) else (held,)


def gradient_replaces(variable: keras.Variable) -> bool:
    """Returns whether the "gradient" of a variable is its next value, as with float8 scales."""
    return isinstance(variable, keras.Variable) and variable.overwrite_with_gradient


def averaged(variables: Iterable[keras.Variable]) -> list[keras.Variable]:
    """Returns the sync-on-read variables that are read as the mean of the replicas' values."""
    read_as_mean = (
        v for v in variables if v.synchronization == "on_read" and v.aggregation == "mean"
    )
    # Central storage has one copy for all replicas.
    return [v for v in read_as_mean if isinstance(native(v), tf.distribute.DistributedValues)]


def statistics_of(layers: Iterable[keras.Layer]) -> list[keras.Variable]:
    """Returns BatchNormalization's moving statistics that are read as the replicas' mean."""
    norms = (
        one for one in layers if isinstance(one, keras.layers.BatchNormalization) and one.built
    )
    return averaged(v for norm in norms for v in (norm.moving_mean, norm.moving_variance))


def check_mirrored(
    variables: Iterable[keras.Variable], native_strategy: tf.distribute.Strategy, owner: str
) -> None:
    """Refuses variables that were not made in the strategy's scope.

    ``tf.distribute`` would fail on them in the middle of a step, with a message about internals.
    """
    strangers = [
        variable.path
        for variable in variables
        if not native_strategy.extended.variable_created_in_scope(native(variable))
    ]
    if strangers:
        raise ScopeError(
            f"Expected {owner} to be made inside of the scope of the model's strategy, so that "
            f"every device has a copy of its variables. Received: variables={strangers[:5]}, made "
            "outside of it. Make the model, its optimizer and its metrics in "
            "`with strategy.scope():`, or pass the optimizer and the metrics by name."
        )


class _Open(threading.local):
    """The listeners to this thread's reads of Keras variables."""

    def __init__(self) -> None:
        self.listeners: list[Callable[[keras.Variable], None]] = []


_open = _Open()


@contextmanager
def reads_preceded(listener: Callable[[keras.Variable], None]) -> Iterator[None]:
    """Calls `listener` before each read of a Keras variable by this thread, in the block."""
    _install()
    _open.listeners.append(listener)
    try:
        yield
    finally:
        _open.listeners.remove(listener)


@cache
def _install() -> None:
    keras_compat.install(read=_tell_listeners)


def _tell_listeners(original: Callable[[Any], Any], variable: Any) -> Any:
    for listener in _open.listeners:
        listener(variable)
    return original(variable)
