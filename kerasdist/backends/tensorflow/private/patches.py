"""Patches of TensorFlow, applied for good when something is made that needs them."""

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
    """Patches TensorFlow, once in a process."""
    # The package's errors leave compiled functions; AutoGraph would raise a `StagingError` instead.
    KerasdistError.ag_pass_through = True  # type: ignore[attr-defined]
    pass_over_own_code()
    let_variables_be_read()
    tf.get_logger().addFilter(_is_of_no_trial)


def pass_over_own_code() -> None:
    """Lets AutoGraph not convert the package's code, like that of TensorFlow and Keras.

    Functions of users that it calls are still converted (`converted_as_here`), which
    `do_not_convert` would exclude, too.
    """
    rules, do_not_convert = internals.CONVERSION_RULES, internals.DO_NOT_CONVERT
    if rules.is_there() and do_not_convert.is_there():
        with_ours = (do_not_convert.get()("kerasdist"), *rules.get())
        rules.set(sys.modules[str(rules.path).partition(":")[0]], with_ours)


def let_variables_be_read() -> None:
    """Gives our mirrored variables the conversions to numbers that ``tf.Variable`` has.

    ``int``, ``float``, ``bool`` and ``np.array`` of a mirrored or sync-on-read variable then give
    what ``.numpy()`` gives. TensorFlow leaves them out, and a user's own strategy has it so:
    ``bool`` is always true, the others raise.
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
        setattr(internals.DISTRIBUTED_VARIABLE.get(), name, conversion)


def _array(variable: Any) -> Callable[..., np.ndarray]:
    if variable.distribute_strategy not in ours:
        raise AttributeError("__array__")  # Python then asks TensorFlow's own `__getattr__`
    # `numpy()` returns a copy.
    return lambda dtype=None, copy=None: np.asarray(variable.numpy(), dtype)


def _number(variable: Any) -> Any:
    if variable.distribute_strategy not in ours:
        raise TypeError(f"Expected a number. Received: {type(variable).__name__}")
    return variable.numpy()


def _truth(variable: Any) -> bool:
    """Returns whether a mirrored variable's value is true, as ``tf.Variable`` does.

    TensorFlow's own code always gets True: it tests whether there is a variable at all
    (`check_destinations`).
    """
    asks = sys._getframe(1).f_globals["__name__"]
    if asks.startswith("tensorflow.") or variable.distribute_strategy not in ours:
        return True
    return bool(tf.convert_to_tensor(variable))


def _is_of_no_trial(record: logging.LogRecord) -> bool:
    """Whether a warning is not that of a trial, which is eager, of eager replicas."""
    return current.trial is None or "eagerly has significant overhead" not in str(record.msg)
