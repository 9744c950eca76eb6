"""Tells of a loss that is not finite on one replica alone, which the numbers of the batch hide."""

from __future__ import annotations

import warnings
from typing import Any, final

import keras
import tensorflow as tf

from kerasdist.backends.tensorflow.variables import native


@final
class LossWatch:
    """Counts the training steps that left each replica's sum of losses finite.

    One step later the gradients have carried what is not finite everywhere; the counts still tell
    where it came from. They are read when an epoch's loss is not finite, so no step waits for it.
    """

    def __init__(self, engine: tf.distribute.Strategy, model: str) -> None:
        """Makes the counters, at zero.

        Args:
            engine: The strategy that runs the replicas.
            model: The model's name, for the warning.
        """
        self._model = model
        self._warned = False
        with engine.scope():
            # A number for each replica, of which each writes its own.
            self._finite_steps = keras.Variable(
                keras.ops.zeros(engine.num_replicas_in_sync, "int64"),
                trainable=False,
                aggregation="sum",
                synchronization="on_read",
            )

    @property
    def variables(self) -> list[Any]:
        """The counters."""
        return [self._finite_steps]

    def count(self, loss_tracker: Any) -> None:
        """Notes in a replica, after its step, whether its own losses are finite.

        Args:
            loss_tracker: The model's mean of losses.
        """
        finite = tf.math.is_finite(tf.convert_to_tensor(loss_tracker.total))
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        count = tf.one_hot(replica, self._finite_steps.shape[0], dtype=tf.int64)
        native(self._finite_steps).assign_add(count * tf.cast(finite, tf.int64))

    def warn(self, loss: Any) -> None:
        """Warns, once, if some replicas lost their loss before the others.

        Args:
            loss: The mean over all replicas, after an epoch.
        """
        if self._warned or tf.math.is_finite(loss):
            return
        counts = self._finite_steps.numpy().tolist()
        if min(counts) == max(counts):
            return
        self._warned = True
        replicas = [replica for replica, count in enumerate(counts) if count == min(counts)]
        warnings.warn(
            f"The training loss of the model {self._model!r} stopped being finite, first on "
            f"replica {', '.join(map(str, replicas))} of {len(counts)} alone. As on one device, it "
            "is not finite for the whole batch then. Look for examples with NaN or infinite "
            "values.",
            stacklevel=2,
        )
