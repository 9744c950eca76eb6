"""A native variable that the replicas divide."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import tensorflow as tf
from tensorflow.python.distribute import distribute_lib, values_util
from tensorflow.python.distribute import values as distributed_values

from kerasdist.backends.tensorflow.division import Division


@final
class Divided(distributed_values.MirroredVariable):
    """A mirrored variable whose copies are parts of one value.

    An update of one copy (`tf.distribute.StrategyExtended.update`) sees that part. All other code
    reads and assigns the whole; with several workers all must read at the same time.

    Attributes:
        division: Who has which part.
        weight: The Keras variable that this one belongs to, as a slot of an optimizer.
        joined: Returns the whole, given the parts of this process.
        assigned: Called with this variable, and the whole that is assigned to it; None if it has
            changed in another way.
    """

    # There is no `__init__`: TensorFlow makes the object, whose class is then changed to this one.

    division: Division
    weight: Any
    joined: Callable[[Division, list[Any]], Any]
    assigned: Callable[[Any, Any], None]

    @property
    def shape(self) -> tf.TensorShape:
        """The shape of what code here reads."""
        whole = distribute_lib.get_update_replica_id() is None
        return tf.TensorShape(self.division.shape if whole else self.division.part_shape)

    def get_shape(self) -> tf.TensorShape:
        """Returns `shape`."""
        return self.shape

    def value(self) -> Any:
        """Returns the value as a tensor."""
        return tf.convert_to_tensor(self._get())

    def assign(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        """Assigns the whole, or in an update the part."""
        done = super().assign(value, *args, **kwargs)
        if distribute_lib.get_update_replica_id() is None and not _in_replica():
            self.assigned(self, value)
        return done

    def _get(self) -> Any:
        own = distribute_lib.get_update_replica_id()
        if own is not None:
            return self._get_replica(own)
        if _in_replica():
            return distribute_lib.get_replica_context().merge_call(lambda _: self._whole())
        return self._whole()

    def _get_cross_replica(self) -> Any:
        return self._whole()

    def _whole(self) -> Any:
        return self.joined(self.division, [one.read_value() for one in self._values])

    def _update(self, update_fn: Callable[..., Any], value: Any, **kwargs: Any) -> Any:
        own = values_util.get_current_replica_id_as_int() if _in_replica() else None
        own = distribute_lib.get_update_replica_id() if own is None else own
        if not isinstance(value, tf.IndexedSlices):
            value = tf.convert_to_tensor(value, self.dtype)
        if own is not None:
            return update_fn(self._values[own], self.division.part(value, own), **kwargs)
        self.assigned(self, None)
        for index, copy in enumerate(self._values):
            with tf.device(copy.device):
                update_fn(copy, self.division.part(value, index), **kwargs)
        return self

    def _gather_saveables_for_checkpoint(self) -> Any:
        # ``tf.train.Checkpoint`` then saves and restores the Keras variable around this one.
        raise NotImplementedError


def _in_replica() -> bool:
    return distribute_lib.has_strategy() and not distribute_lib.in_cross_replica_context()
