"""Permanent patches of TensorFlow, applied when a strategy or a compiled function is made."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import tensorflow as tf

from kerasdist.backends.tensorflow import internals
from kerasdist.backends.tensorflow.private.strategies import ours
from kerasdist.core.context import current
from kerasdist.errors import KerasdistError


@cache
def install() -> None:
    """Patches TensorFlow, once per process."""
    # With this attribute AutoGraph raises kerasdist's errors unchanged, and not a `StagingError`.
    KerasdistError.ag_pass_through = True  # type: ignore[attr-defined]
    pass_over_own_code()
    let_variables_be_read()
    tf.get_logger().addFilter(_is_of_no_trial)


def pass_over_own_code() -> None:
    """Makes AutoGraph leave kerasdist's code unconverted, like TensorFlow's and Keras's code.

    Users' functions that kerasdist calls are still converted (`converted_as_here`). The decorator
    `do_not_convert` on kerasdist's own functions would also prevent that conversion.
    """
    rules, do_not_convert = internals.CONVERSION_RULES, internals.DO_NOT_CONVERT
    if rules.is_there() and do_not_convert.is_there():
        setattr(*rules.place, (do_not_convert.value("kerasdist"), *rules.value))


def let_variables_be_read() -> None:
    """Makes kerasdist's mirrored variables convertible to numbers, as a ``tf.Variable`` is.

    ``int``, ``float``, ``bool`` and ``np.array`` of a mirrored or sync-on-read variable then return
    the value of ``.numpy()``. TensorFlow does not define these conversions. Variables of a user's
    own strategy stay unchanged: their ``bool`` is always True, and the other conversions raise.
    """
    if not internals.DISTRIBUTED_VARIABLE.is_there():
        return
    conversions: dict[str, object] = {
        "__array__": property(_array),
        "__bool__": _truth,
        "__int__": lambda variable: int(_number(variable)),
        "__float__": lambda variable: float(_number(variable)),
        "__complex__": lambda variable: complex(_number(variable)),
    }
    for name, conversion in conversions.items():
        setattr(internals.DISTRIBUTED_VARIABLE.value, name, conversion)


def _array(variable: Any) -> Callable[..., np.ndarray]:
    if variable.distribute_strategy not in ours:
        raise AttributeError("__array__")  # Python then calls TensorFlow's own `__getattr__`
    # `numpy()` already returns a copy.
    return lambda dtype=None, copy=None: np.asarray(variable.numpy(), dtype)


def _number(variable: Any) -> Any:
    if variable.distribute_strategy not in ours:
        raise TypeError(f"Expected a number. Received: {type(variable).__name__}")
    return variable.numpy()


def _truth(variable: Any) -> bool:
    """Returns whether a mirrored variable's value is true, as for ``tf.Variable``.

    TensorFlow's own code always gets True. It tests an argument, as in `check_destinations`, only
    to find out whether the caller has passed a variable.
    """
    asks = sys._getframe(1).f_globals["__name__"]
    if asks.startswith("tensorflow.") or variable.distribute_strategy not in ours:
        return True
    return bool(tf.convert_to_tensor(variable))


def _is_of_no_trial(record: logging.LogRecord) -> bool:
    """Returns False for TensorFlow's warning that eager code is slow, if a trial is running.

    A trial, such as the check of the first step, runs a step eagerly on purpose.
    """
    return current.trial is None or "eagerly has significant overhead" not in str(record.msg)
