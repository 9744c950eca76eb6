"""A learning rate that grows in the first epochs."""

from __future__ import annotations

import math
from typing import Any, final

import keras

from kerasdist.keras_compat import ops
from kerasdist.training.binding import binding_of


@final
class LearningRateWarmup(keras.callbacks.Callback):
    """Lets the learning rate grow from that of one replica to that of all, in the first epochs.

    For a learning rate that was multiplied by the number of replicas together with the global batch
    size. It is set before every batch, in equal steps; afterwards it is left alone.

    Example::

        warmup = kd.callbacks.LearningRateWarmup(epochs=2)
        model.fit(x, y, epochs=3, callbacks=[warmup])

    Source: Goyal et al., "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour", 2017,
    section 2.2; Horovod's ``LearningRateWarmupCallback``.
    """

    def __init__(
        self,
        target: float | None = None,
        *,
        epochs: float = 5,
        start: float | None = None,
        steps_per_epoch: int | None = None,
    ) -> None:
        """Makes the callback.

        Args:
            target: The learning rate at the end; None: the optimizer's.
            epochs: How long it takes, not necessarily whole epochs.
            start: The learning rate of the first batch; None: `target` divided by the number of
                replicas.
            steps_per_epoch: The number of batches of an epoch; None: as `fit` knows it.

        Raises:
            ValueError: If `epochs` is negative.
        """
        super().__init__()
        if epochs < 0:
            raise ValueError(f"Expected epochs of at least 0. Received: {epochs=}.")
        self._given = target, start
        self._epochs = epochs
        self._steps_per_epoch = steps_per_epoch
        self._epoch = 0
        self._rates = (0.0, 0.0)
        self._warm_up_steps = 0

    def on_train_begin(self, logs: dict[str, object] | None = None) -> None:
        """Reads the learning rate that training begins with."""
        del logs
        steps = self._steps_per_epoch or (self.params or {}).get("steps")
        if steps is None:
            raise ValueError(
                "Expected the number of batches of an epoch. Received: steps_per_epoch=None, and "
                "data of unknown length. Give it: LearningRateWarmup(steps_per_epoch=...)."
            )
        target, start = self._given
        if target is None:
            target = float(ops.convert_to_numpy(self._optimizer.learning_rate))
        binding = binding_of(self.model)
        replicas = 1 if binding is None else binding.replicas.num_replicas
        self._rates = (target / replicas if start is None else start), target
        self._steps_per_epoch = steps
        self._warm_up_steps = math.ceil(self._epochs * steps)

    def on_epoch_begin(self, epoch: int, logs: dict[str, object] | None = None) -> None:
        """Remembers the number of the epoch, on which the learning rate depends."""
        del logs
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: dict[str, object] | None = None) -> None:
        """Sets the learning rate of a batch."""
        del logs
        assert self._steps_per_epoch is not None  # `on_train_begin` has set it
        step = self._epoch * self._steps_per_epoch + batch
        if step > self._warm_up_steps:
            return
        start, target = self._rates
        part = step / self._warm_up_steps if self._warm_up_steps else 1.0
        self._optimizer.learning_rate = start + part * (target - start)

    @property
    def _optimizer(self) -> Any:
        model: Any = self.model
        return model.optimizer
