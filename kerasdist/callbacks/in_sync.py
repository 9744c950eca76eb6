"""Weights that are equal on all workers, epoch by epoch."""

from __future__ import annotations

from typing import Any, final

import keras

from kerasdist import keras_seam
from kerasdist.agreement import weights
from kerasdist.binding import binding_of


@final
class InSync(keras.callbacks.Callback):
    """Compares the weights of all workers at the end of each epoch, by a checksum.

    Also the sizes of the batches that they have trained on. It stands behind the callbacks that may
    change weights, and before those that back them up.
    """

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Forgets batches that were not trained on in this call."""
        del logs
        binding = binding_of(keras_seam.model_of(self))
        if binding is not None:
            binding.replicas.begin_training(keras_seam.model_of(self))

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Compares. All workers must call it.

        Args:
            epoch: The epoch.
            logs: Not used.

        Raises:
            DisagreementError: If the weights differ.
        """
        del logs
        require_equal_weights(self.model, f"the end of epoch {epoch + 1}")


def require_equal_weights(model: Any, when: str) -> None:
    """Makes sure that a model has the same weights on all workers. All workers must call it.

    Args:
        model: A Keras model.
        when: When that is, for messages.

    Raises:
        DisagreementError: If the weights differ.
    """
    binding = binding_of(model)
    if binding is not None:
        weights.require_equal_batches(model, binding.replicas, when)
        weights.require_equal(model, binding.replicas, when)
