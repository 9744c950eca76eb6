"""Patches of TensorFlow, applied for good when the backend is imported."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.autograph.core import config as autograph_config
from tensorflow.python.distribute import values as distributed_values
from tensorflow.python.distribute import values_util
from tensorflow.python.eager.polymorphic_function import polymorphic_function

from kerasdist.backends.base.variable_rules import shares_of_integers
from kerasdist.core.context import current
from kerasdist.errors import KerasdistError


@cache
def install() -> None:
    """Patches TensorFlow, once in a process."""
    # AutoGraph is not to convert the package's code, like that of TensorFlow and Keras; functions
    # of users that it calls are still converted (`converted_as_here`), which `do_not_convert` would
    # exclude, too.
    rule = autograph_config.DoNotConvert("kerasdist")
    autograph_config.CONVERSION_RULES = (rule, *autograph_config.CONVERSION_RULES)
    # The package's errors leave compiled functions; AutoGraph would raise a `StagingError` instead.
    KerasdistError.ag_pass_through = True  # type: ignore[attr-defined]
    let_variables_be_read()
    keep_sums_of_integers()
    run_trials_eagerly()
    tf.get_logger().addFilter(_is_of_no_trial)


def let_variables_be_read() -> None:
    """Gives mirrored variables the conversions to numbers that ``tf.Variable`` has.

    ``int``, ``float``, ``bool`` and ``np.array`` of a mirrored or sync-on-read variable then give
    what ``.numpy()`` gives. TensorFlow leaves them out: ``bool`` is always true, the others raise.
    """

    def array(variable: Any, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(variable.numpy(), dtype)  # `numpy()` returns a copy

    conversions: dict[str, Callable[..., Any]] = {
        "__array__": array,
        "__bool__": _truth,
        "__int__": lambda variable: int(variable.numpy()),
        "__float__": lambda variable: float(variable.numpy()),
        "__complex__": lambda variable: complex(variable.numpy()),
    }
    for name, conversion in conversions.items():
        setattr(distributed_values.DistributedVariable, name, conversion)


def _truth(variable: Any) -> bool:
    """Returns whether a mirrored variable's value is true, as ``tf.Variable`` does.

    TensorFlow's own code always gets True: it tests whether there is a variable at all
    (`check_destinations`).
    """
    asks = sys._getframe(1).f_globals["__name__"]
    return asks.startswith("tensorflow.") or bool(tf.convert_to_tensor(variable))


def keep_sums_of_integers() -> None:
    """Makes an integer variable that is read as a sum return the value that was assigned to it.

    TensorFlow assigns the value, divided by the number of replicas and rounded down, to each
    replica: with two replicas, a confusion matrix of ones would be read as zeros. Here the first
    replica also gets the remainder.
    """
    original = values_util.on_read_assign_cross_replica

    def assign(var: Any, value: Any, read_value: bool = True) -> Any:
        if var.aggregation != tf.VariableAggregation.SUM or not var.dtype.is_integer:
            return original(var, value, read_value)
        native_strategy = var.distribute_strategy
        replicas = native_strategy.num_replicas_in_sync
        total = tf.cast(value, var.dtype)
        first_share, share = shares_of_integers(total, replicas)
        first = native_strategy.extended._get_replica_id_in_sync_group(0)
        ranks = iter(range(first, first + replicas))

        def assign_share(device: object, variable: object, value: object) -> Any:
            part = first_share if next(ranks) == 0 else share
            return values_util.assign_on_device(device, variable, part)

        return values_util.assign_on_each_device(var, assign_share, total, read_value)

    values_util.on_read_assign_cross_replica = assign


def run_trials_eagerly() -> None:
    """Runs compiled functions eagerly in a trial: they would keep its copies of variables."""
    function: Any = polymorphic_function.Function
    known = function._run_functions_eagerly.fget

    def runs_eagerly(compiled: object) -> bool:
        return known(compiled) or current.trial is not None

    function._run_functions_eagerly = property(runs_eagerly)


def _is_of_no_trial(record: logging.LogRecord) -> bool:
    """Whether a warning is not that of a trial, which is eager, of eager replicas."""
    return current.trial is None or "eagerly has significant overhead" not in str(record.msg)
