"""The native strategies of one process, and the values that they make."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import distribute_utils, ps_values
from tensorflow.python.distribute import values as distributed_values

# The collective keys reserved per strategy, which needs far fewer: one per group of devices.
KEYS_OF_A_STRATEGY = 100_000

# What the package's own kinds of distributed variables hold beside TensorFlow's attributes.
_OWN = ("is_equal", "known")


def mirrored_strategy(devices: list[str], *, share_memory: bool) -> tf.distribute.MirroredStrategy:
    """Returns a ``MirroredStrategy`` that works beside others in the same process.

    TensorFlow gives the devices of each strategy the same key, so that a collective of a second
    strategy with other devices fails: "Device CPU:0 is joining a group with size 3, but that group
    has size 2".
    """
    native_class = tf.distribute.MirroredStrategy
    native_class._collective_key_base += KEYS_OF_A_STRATEGY
    reduction = tf.distribute.ReductionToOneDevice() if share_memory else None
    return native_class(devices, cross_device_ops=reduction)


def group_key() -> int:
    """Returns the group key of kerasdist's own collectives under the newest strategy.

    It is the last one reserved; TensorFlow numbers its own groups from the first one on.
    """
    return tf.distribute.MirroredStrategy._collective_key_base + KEYS_OF_A_STRATEGY - 1


def central_storage_strategy(devices: list[str], home: str) -> Any:
    """Returns a ``tf.distribute`` strategy that keeps variables on one device."""
    tf.distribute.MirroredStrategy._collective_key_base += KEYS_OF_A_STRATEGY
    return tf.distribute.experimental.CentralStorageStrategy(devices, home)


def keeps_one_copy(native_strategy: tf.distribute.Strategy) -> bool:
    """Returns whether all replicas share one copy of each variable."""
    return isinstance(native_strategy, tf.distribute.experimental.CentralStorageStrategy)


def per_replica(parts: Iterable[Any]) -> Any:
    """Returns a ``tf.distribute`` value with these components."""
    return distribute_utils.regroup(tuple(parts), always_wrap=True)


def mirrored(parts: Sequence[Any]) -> Any:
    """Returns a ``tf.distribute`` value whose components are equal."""
    return distributed_values.Mirrored(parts)


def is_distributed(variable: object) -> bool:
    """Returns whether a native variable was made by a strategy."""
    kinds = (distributed_values.DistributedVariable, ps_values.AggregatingVariable)
    return isinstance(variable, kinds)


@contextmanager
def keeping_input_devices(native_strategy: tf.distribute.Strategy) -> Iterator[None]:
    """Restores the devices of a strategy's input pipelines at the end.

    A dataset with one pipeline per replica changes them for good: every later dataset of the
    strategy would get one pipeline per replica too, and each replica the same batches (seen with
    2.21).
    """
    devices = native_strategy.extended._input_workers_devices
    try:
        yield
    finally:
        native_strategy.extended._input_workers_devices = devices


def plain_copy(variable: Any, value: tf.Tensor) -> tf.Variable:
    """Returns a plain copy of a variable, which Keras's optimizers identify with the original."""
    copy = tf.Variable(value, trainable=variable.trainable, name="copy", shape=value.shape)
    # The id by which an optimizer finds the variable's slots.
    vars(copy)["_unique_id"] = variable._unique_id
    return copy


def replicated_copy(variable: object) -> Any:
    """Returns a copy of a strategy's variable, with the same value on each device."""
    if isinstance(variable, ps_values.AggregatingVariable):
        return type(variable)(
            variable._distribute_strategy, _copy(variable._v), variable._aggregation
        )
    if not isinstance(variable, distributed_values.DistributedVariable):
        return _copy(variable)
    parts = [_copy(one) for one in variable.values]
    copy = type(variable)(
        variable._distribute_strategy, parts, variable._aggregation, variable._policy
    )
    vars(copy).update({name: one for name, one in vars(variable).items() if name in _OWN})
    return copy


def _copy(variable: Any) -> tf.Variable:
    with tf.device(variable.device):
        return plain_copy(variable, variable.read_value())
