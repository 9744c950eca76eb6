"""Losses that layers add: kept in the replica, since the layer object is shared by all of them.

Inside a ``keras.StatelessScope`` of Keras or the user (``stateless_call``, Keras's own step on JAX)
they are Keras's: it keeps them in that scope, and forgets them with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras

from kerasdist import context, keras_seam
from kerasdist.keras_seam import ops
from kerasdist.replica_context import ReplicaContext
from kerasdist.training import numerics, probe


def add_loss(original: Callable[..., Any], layer: Any, loss: Any) -> None:
    """Notes a loss that a layer adds in its call.

    Args:
        original: Keras's ``Layer.add_loss``.
        layer: The layer.
        loss: A tensor or a structure of tensors.
    """
    trial = probe.running()
    if trial is not None:
        trial.note_added(layer, loss)
    losses = _of_replica()
    if losses is None:
        original(layer, loss)
    else:
        losses.setdefault(id(layer), (layer, []))[1].extend(keras.tree.flatten(loss))


def own_losses(original: Callable[..., Any], layer: Any) -> list[Any]:
    """Returns the losses that a layer added in this replica.

    Args:
        original: Keras's ``Layer._get_own_losses``.
        layer: The layer.
    """
    losses = _of_replica()
    return original(layer) if losses is None else list(losses.get(id(layer), (layer, ()))[1])


def clear_losses(original: Callable[..., Any], layer: Any) -> None:
    """Forgets what a layer and the layers inside it added.

    Args:
        original: Keras's ``Layer._clear_losses``.
        layer: The layer.
    """
    losses = _of_replica()
    if losses is None:
        original(layer)
        return
    # Keras clears before the outermost call of a step, and a replica's step has one model: all go.
    for inner in layer._flatten_layers():
        losses.pop(id(inner), None)
        keras_seam.losses_on(inner).clear()  # those of a call before this step


def hand_over(replicas: Sequence[ReplicaContext]) -> None:
    """Lets layers have, after a step, the losses that they added, as Keras lets them.

    Args:
        replicas: All replicas of the step, each with its share of the batch.
    """
    everyones = [replica.layer_losses for replica in replicas]
    for key, (layer, _) in everyones[0].items():
        parts = [of_replica[key][1] for of_replica in everyones if key in of_replica]
        if len(parts) == len(replicas):
            keras_seam.losses_on(layer)[:] = [
                sum(
                    numerics.weighted(ops.stop_gradient(loss), replica.weight)
                    for loss, replica in zip(losses, replicas, strict=True)
                )
                for losses in zip(*parts, strict=False)
            ]


def _of_replica() -> dict[int, tuple[Any, list[Any]]] | None:
    """The losses of the replica whose code this is, or None where Keras keeps them itself."""
    replica = context.replica()
    if replica is None:
        return None
    scope = keras_seam.stateless_scope()
    if scope is None:
        # A replica that is alone shares no layer, and its context outlives its models.
        return None if replica.num_replicas_in_sync == 1 else replica.layer_losses
    return None if type(scope) is keras.StatelessScope else replica.layer_losses
