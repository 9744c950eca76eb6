"""Compares the weights of all workers, epoch by epoch."""

from __future__ import annotations

from typing import Any, final

import keras

from kerasdist import keras_compat
from kerasdist.agreement import weights
from kerasdist.training.binding import binding_of


@final
class InSync(keras.callbacks.Callback):
    """Compares the weights of all workers at the end of each epoch, by a checksum.

    It compares the sizes of the batches too. It runs after the callbacks that may change weights,
    and before those that back them up.
    """

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Forgets the batches before this call."""
        del logs
        binding = binding_of(keras_compat.model_of(self))
        if binding is not None and binding.replicas.job is not None:
            history = binding.replicas.batch_history
            history.clear()
            binding.replicas.job.report_batches(history.report)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Compares batches and weights. All workers must call it."""
        del logs
        require_equal_weights(self.model, f"the end of epoch {epoch + 1}")


def require_equal_weights(model: Any, when: str) -> None:
    """Raises DisagreementError if workers have different weights. All workers must call it."""
    binding = binding_of(model)
    if binding is not None:
        weights.require_equal_batches(binding.replicas, when)
        weights.require_equal(model, binding.replicas, when)
