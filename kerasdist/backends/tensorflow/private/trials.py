"""Changes of TensorFlow that last for a trial of a training step."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context as eager_context


@contextmanager
def without_advice() -> Iterator[None]:
    """Silences TensorFlow's advice that replicas run faster in a graph."""
    logger = tf.get_logger()
    level = logger.level
    logger.setLevel("ERROR")
    try:
        yield
    finally:
        logger.setLevel(level)


def plain_copy(variable: Any, value: tf.Tensor) -> tf.Variable:
    """Returns a plain copy of a variable, which Keras's optimizers identify with the original."""
    copy = tf.Variable(value, trainable=variable.trainable, name="copy", shape=variable.shape)
    # The id by which an optimizer finds the variable's slots.
    vars(copy)["_unique_id"] = variable._unique_id
    return copy


# Functions of `tf.random` that draw; `shuffle` reorders.
_DRAWING = (
    "categorical",
    "gamma",
    "normal",
    "poisson",
    "shuffle",
    "stateless_categorical",
    "stateless_gamma",
    "stateless_normal",
    "stateless_poisson",
    "stateless_truncated_normal",
    "stateless_uniform",
    "truncated_normal",
    "uniform",
)


@contextmanager
def draws_replaced(draw: Callable[[str, Callable[[], Any], Any], Any]) -> Iterator[None]:
    """Calls `draw` in place of TensorFlow's random functions, in the block."""
    places = [(tf.random, name) for name in _DRAWING] + [(tf.nn, "dropout")]
    originals = [getattr(owner, name) for owner, name in places]

    def replaced(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def drawn(*args: Any, **kwargs: Any) -> Any:
            first = args[0] if args else next(iter(kwargs.values()), None)
            known = name if name in ("shuffle", "dropout") else f"tf.random.{name}"
            return draw(known, lambda: original(*args, **kwargs), first)

        return drawn

    for (owner, name), original in zip(places, originals, strict=True):
        setattr(owner, name, replaced(name, original))
    try:
        yield
    finally:
        for (owner, name), original in zip(places, originals, strict=True):
            setattr(owner, name, original)


class RandomState:
    """The state of the generator that seeds eager random operations without their own seed."""

    def __init__(self) -> None:
        self._own = vars(eager_context.context())
        self._before = {name: self._own.get(name) for name in ("_seed", "_rng")}
        numbers = self._before["_rng"]  # none before a seed is set
        self._state = None if numbers is None else numbers.getstate()

    def replace(self, seed: int) -> None:
        """Seeds random operations from a generator with this seed until `restore`."""
        self._own.update(_seed=seed, _rng=random.Random(seed))

    def restore(self) -> None:
        """Restores the generator and its state."""
        self._own.update(self._before)
        numbers = self._before["_rng"]
        if numbers is None or numbers.getstate() == self._state:
            return
        numbers.setstate(self._state)
        # Otherwise cached kernels with the same seed would continue their sequence of numbers.
        context: Any = eager_context.context()
        context.clear_kernel_cache()
