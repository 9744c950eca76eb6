"""What code that runs once a replica can ask: who am I, and what do the others hold."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kerasdist import context
from kerasdist.backends.base import Collectives, SoleReplica

if TYPE_CHECKING:
    from kerasdist.strategy import Strategy


@dataclass(frozen=True)
class BatchShare:
    """Which part of the global batch a replica holds, in a step of `fit`, `evaluate` or `predict`.

    Attributes:
        size: Number of examples here: an int, or an int32 scalar tensor where it is not known
            before the step runs.
        total: Number of examples in the global batch, like `size`.
        weight: ``size / total``, a float or a float32 scalar tensor, 0 for a replica without
            example.
    """

    size: Any
    total: Any
    weight: Any


@dataclass(frozen=True, eq=False)
class ReplicaContext:
    """One replica of a step.

    Attributes:
        strategy: The strategy that runs the step.
        replica_id_in_sync_group: This replica's number, from 0.
        num_replicas_in_sync: How many replicas take part.
    """

    strategy: Strategy
    replica_id_in_sync_group: int
    num_replicas_in_sync: int
    # Below: for kerasdist itself.
    collectives: Collectives = field(default_factory=SoleReplica, repr=False)
    # None in code that follows tf.distribute's rules, set where the one-device contract holds.
    share: BatchShare | None = field(default=None, repr=False)
    # Losses added by layers in this replica, by the layer's id: Keras keeps them on the layer,
    # which all replicas share.
    layer_losses: dict[int, list[Any]] = field(default_factory=dict, repr=False)

    @property
    def weight(self) -> Any:
        """This replica's share of the examples; only where the one-device contract holds."""
        assert self.share is not None
        return self.share.weight


def one_device_replica() -> ReplicaContext | None:
    """Returns the replica whose code this is, if the one-device contract holds in it, else None."""
    replica = context.replica()
    return replica if replica is not None and replica.share is not None else None


def global_batch(tensor: Any) -> Any:
    """Returns the rows of all replicas, in the order of the global batch.

    For code inside a model, a loss or a `train_step` that mixes examples by itself, such as a
    contrastive loss over the batch: on TensorFlow and PyTorch a replica holds only its own rows.
    The gradient flows through. On one device, on JAX (where `fit` is one global program), and
    outside a replica, it returns `tensor` itself. All replicas must call it.

    Args:
        tensor: A tensor of shape ``(n, ...)``, n the replica's own number of examples.

    Returns:
        A tensor of shape ``(N, ...)``, N the number of examples in the global batch.
    """
    replica = context.replica()
    return tensor if replica is None else replica.collectives.all_gather(tensor)
