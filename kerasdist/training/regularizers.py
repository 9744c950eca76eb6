"""Activity regularizers over replicas: a penalty on the outputs of a whole batch.

L1 and L2 are means over the examples, since Keras divides them by the number of rows, so they need
no change. Any other regularizer sees the rows of all replicas. Keras before 3.14 does not divide:
there L1 and L2 see the rows of all replicas too, and nothing is divided.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import keras

from kerasdist import keras_compat
from kerasdist.api.replica_context import one_device_replica
from kerasdist.api.scopes import has_strategy
from kerasdist.training.binding import bind
from kerasdist.training.numerics import weighted

# The penalties that are means over examples.
_MEANS = (
    (keras.regularizers.L1, keras.regularizers.L2, keras.regularizers.L1L2)
    if keras_compat.DIVIDES_ACTIVITY_PENALTY
    else ()
)


class GlobalBatchRegularizer:
    """A mixin for an activity regularizer that may mix examples: gives it the global batch."""

    def __call__(self, x: Any) -> Any:
        """Returns the penalty of the rows of all replicas; all replicas must call it."""
        replica = one_device_replica()
        if replica is None:
            return super().__call__(x)  # type: ignore[misc]
        penalty = super().__call__(replica.collectives.all_gather(x))  # type: ignore[misc]
        if not keras_compat.DIVIDES_ACTIVITY_PENALTY:
            return penalty
        # Keras divides by this replica's number of rows, but the global batch's is right.
        return weighted(penalty, replica.weight)


def layer_created(original: Callable[..., None], layer: Any, *args: Any, **kwargs: Any) -> None:
    """Lets a layer's activity regularizer see the global batch, if the layer is made in a scope."""
    original(layer, *args, **kwargs)
    regularizer = layer.activity_regularizer
    if regularizer is None or type(regularizer) in _MEANS or not has_strategy():
        return
    # A copy, since the same object may also regularize a kernel, which has no rows to gather.
    layer.activity_regularizer = copy.copy(regularizer)
    bind(layer.activity_regularizer, GlobalBatchRegularizer)
