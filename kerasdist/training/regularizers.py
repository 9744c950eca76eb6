"""Activity regularizers over replicas: a penalty on the outputs of a whole batch.

Keras's own are sums over the batch, which are scaled; any other one sees the rows of all replicas.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from kerasdist import context, keras_seam
from kerasdist.replica_context import one_device_replica
from kerasdist.training.binding import bind
from kerasdist.training.numerics import per_weight


class BatchSumRegularizer:
    """Put before the class of an activity regularizer that Keras ships: a sum over the batch."""

    def __call__(self, x: Any) -> Any:
        """Returns the penalty whose weighted mean over the replicas is that of one device."""
        penalty = super().__call__(x)  # type: ignore[misc]
        replica = one_device_replica()
        return penalty if replica is None else per_weight(penalty, replica.weight)


class GlobalBatchRegularizer:
    """Put before the class of any other activity regularizer."""

    def __call__(self, x: Any) -> Any:
        """Returns the penalty of the rows of all replicas; all replicas must call it."""
        replica = one_device_replica()
        return super().__call__(x if replica is None else replica.collectives.all_gather(x))  # type: ignore[misc]


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
    if regularizer is None or not context.has_strategy():
        return
    own = keras_seam.is_kerass_own(type(regularizer))
    # A copy: the same object may regularize a kernel, which is no batch.
    layer.activity_regularizer = copy.copy(regularizer)
    bind(layer.activity_regularizer, BatchSumRegularizer if own else GlobalBatchRegularizer)
