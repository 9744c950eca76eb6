"""Losses that layers add: kept in the replica, since the layer object is shared by all of them.

Inside a ``keras.StatelessScope`` of Keras or the user (``stateless_call``, Keras's own step on JAX)
they are Keras's: it keeps them in that scope, and forgets them with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from kerasdist import context, keras_seam
from kerasdist.training import probe


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
        losses.setdefault(id(layer), []).extend(keras.tree.flatten(loss))


def own_losses(original: Callable[..., Any], layer: Any) -> list[Any]:
    """Returns the losses that a layer added in this replica.

    Args:
        original: Keras's ``Layer._get_own_losses``.
        layer: The layer.
    """
    losses = _of_replica()
    return original(layer) if losses is None else list(losses.get(id(layer), ()))


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


def _of_replica() -> dict[int, list[Any]] | None:
    """The losses of the replica whose code this is, or None where Keras keeps them itself."""
    replica = context.replica()
    if replica is None:
        return None
    scope = keras_seam.stateless_scope()
    if scope is None:
        # A replica that is alone shares no layer, and its context outlives its models.
        return None if replica.num_replicas_in_sync == 1 else replica.layer_losses
    return None if type(scope) is keras.StatelessScope else replica.layer_losses
