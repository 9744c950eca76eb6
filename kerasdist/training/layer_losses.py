"""Keeps the losses that layers add by replica, since all replicas share the layer object.

Inside a ``keras.StatelessScope`` of Keras or the user (``stateless_call``, Keras's own step on JAX)
Keras keeps these losses itself, in that scope.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras

from kerasdist import keras_compat
from kerasdist.api.replica_context import ReplicaContext
from kerasdist.core import context
from kerasdist.keras_compat import ops
from kerasdist.training import numerics


def add_loss(original: Callable[..., Any], layer: Any, loss: Any) -> None:
    """Keeps a loss that a layer adds in its call, by replica where replicas share the layer."""
    losses = _of_replica()
    if losses is None:
        original(layer, loss)
    else:
        losses.setdefault(id(layer), (layer, []))[1].extend(keras.tree.flatten(loss))


def own_losses(original: Callable[..., Any], layer: Any) -> list[Any]:
    """Returns the losses that a layer added in this replica."""
    losses = _of_replica()
    return original(layer) if losses is None else list(losses.get(id(layer), (layer, ()))[1])


def clear_losses(original: Callable[..., Any], layer: Any) -> None:
    """Removes the losses of a layer and of the layers inside it."""
    losses = _of_replica()
    if losses is None:
        original(layer)
        return
    # Keras calls this for the outermost layer of a step: inner layers' losses must go too.
    layers = list(layer._flatten_layers())
    for inner in layers:
        losses.pop(id(inner), None)
    if keras_compat.trial() is None:
        keras_compat.clear_losses_on(layers)  # losses of a call before this step


def hand_over(replicas: Sequence[ReplicaContext]) -> None:
    """Stores each added loss on its layer, as Keras does: the weighted mean of the replicas'."""
    if keras_compat.trial() is not None:
        return
    everyones = [replica.layer_losses for replica in replicas]
    for key, (layer, _) in everyones[0].items():
        parts = [of_replica[key][1] for of_replica in everyones if key in of_replica]
        if len(parts) == len(replicas):
            keras_compat.losses_on(layer)[:] = [
                sum(
                    numerics.weighted(ops.stop_gradient(loss), replica.weight)
                    for loss, replica in zip(losses, replicas, strict=True)
                )
                for losses in zip(*parts, strict=False)
            ]


def _of_replica() -> dict[int, tuple[Any, list[Any]]] | None:
    """Returns the losses of the current replica, None where Keras keeps them itself."""
    replica, scope = context.replica(), keras_compat.stateless_scope()
    if replica is None:  # a trial on one device keeps them, for itself alone
        return None if scope is None or scope is not keras_compat.trial() else scope.layer_losses
    if scope is None:
        # A single replica shares its layers with no other one: Keras's own list serves.
        return None if replica.num_replicas_in_sync == 1 else replica.layer_losses
    return None if type(scope) is keras.StatelessScope else replica.layer_losses
