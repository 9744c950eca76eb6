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
        self._engine = engine
        self._model = model
        self._warned = False
        with engine.scope():
            self._finite_steps = keras.Variable(
                0, dtype="int64", trainable=False, aggregation="sum", synchronization="on_read"
            )

    def count(self, loss_tracker: Any) -> None:
        """Notes in a replica, after its step, whether its own losses are finite.

        Args:
            loss_tracker: The model's mean of losses.
        """
        finite = tf.math.is_finite(tf.convert_to_tensor(loss_tracker.total))
        native(self._finite_steps).assign_add(tf.cast(finite, tf.int64))

    def warn(self, loss: Any) -> None:
        """Warns, once, if some replicas lost their loss before the others.

        Args:
            loss: The mean over all replicas, after an epoch.
        """
        if self._warned or tf.math.is_finite(loss):
            return
        parts = self._engine.experimental_local_results(native(self._finite_steps))
        counts = [int(part.numpy()) for part in parts]
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
