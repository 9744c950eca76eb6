"""The private part of TensorFlow that divides a sum among the replicas; a test watches it."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import mirrored_strategy, values_util


def keep_sums_of_integers() -> None:
    """Lets integers that are assigned to a variable read as a sum be read as they were assigned.

    TensorFlow gives each replica the value divided by the number of replicas, cut to an integer: of
    a confusion matrix of ones that two replicas hold nothing is left. Here the first replica holds
    the rest, too.
    """
    original = values_util.on_read_assign_cross_replica

    def assign(var: Any, value: Any, read_value: bool = True) -> Any:
        if var.aggregation != tf.VariableAggregation.SUM or not var.dtype.is_integer:
            return original(var, value, read_value)
        engine = var.distribute_strategy
        replicas = engine.num_replicas_in_sync
        total = tf.cast(value, var.dtype)
        share = total // replicas
        first = engine.extended._get_replica_id_in_sync_group(0)
        ranks = iter(range(first, first + replicas))

        def assign_share(device: Any, variable: Any, value: Any) -> Any:
            part = value - share * (replicas - 1) if next(ranks) == 0 else share
            return values_util.assign_on_device(device, variable, part)

        return values_util.assign_on_each_device(var, assign_share, total, read_value)

    values_util.on_read_assign_cross_replica = assign


def private_names() -> tuple[object, ...]:
    """Returns what this file needs of TensorFlow, for the test that watches it."""
    return (
        values_util.assign_on_device,
        values_util.assign_on_each_device,
        mirrored_strategy.MirroredExtended._get_replica_id_in_sync_group,
    )
