"""Activity regularizers over replicas: a penalty on the outputs of a whole batch.

L1 and L2 are means over the examples once Keras has divided them by the number of rows, so they
need nothing. Any other one sees the rows of all replicas. Where Keras does not divide, before 3.14,
so do these.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import keras

from kerasdist import context, keras_seam
from kerasdist.binding import bind
from kerasdist.replica_context import one_device_replica
from kerasdist.training.numerics import weighted

# The penalties that are means over examples.
_MEANS = (
    (keras.regularizers.L1, keras.regularizers.L2, keras.regularizers.L1L2)
    if keras_seam.DIVIDES_ACTIVITY_PENALTY
    else ()
)


class GlobalBatchRegularizer:
    """Put before the class of an activity regularizer that may mix examples."""

    def __call__(self, x: Any) -> Any:
        """Returns the penalty of the rows of all replicas; all replicas must call it."""
        replica = one_device_replica()
        if replica is None:
            return super().__call__(x)  # type: ignore[misc]
        penalty = super().__call__(replica.collectives.all_gather(x))  # type: ignore[misc]
        if not keras_seam.DIVIDES_ACTIVITY_PENALTY:
            return penalty
        # Keras divides by this replica's number of rows, where it must be the global batch's.
        return weighted(penalty, replica.weight)


def layer_created(original: Callable[..., None], layer: Any, *args: Any, **kwargs: Any) -> None:
    """Lets a layer's activity regularizer learn of replicas, if the layer is made in a scope.

    Args:
        original: Keras's ``Layer.__init__``.
        layer: The layer.
        *args: As Keras's.
        **kwargs: As Keras's.
    """
    original(layer, *args, **kwargs)
    regularizer = layer.activity_regularizer
    if regularizer is None or type(regularizer) in _MEANS or not context.has_strategy():
        return
    # A copy: the same object may regularize a kernel, which is no batch.
    layer.activity_regularizer = copy.copy(regularizer)
    bind(layer.activity_regularizer, GlobalBatchRegularizer)
