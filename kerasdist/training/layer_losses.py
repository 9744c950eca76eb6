"""Losses that layers add: kept in the replica, since the layer object is shared by all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from kerasdist import context


def add_loss(original: Callable[..., Any], layer: Any, loss: Any) -> None:
    """Notes a loss that a layer adds in its call.

    Args:
        original: Keras's ``Layer.add_loss``.
        layer: The layer.
        loss: A tensor or a structure of tensors.
    """
    replica = context.replica()
    if replica is None:
        original(layer, loss)
    else:
        replica.layer_losses.setdefault(id(layer), []).extend(keras.tree.flatten(loss))


def own_losses(original: Callable[..., Any], layer: Any) -> list[Any]:
    """Returns the losses that a layer added in this replica.

    Args:
        original: Keras's ``Layer._get_own_losses``.
        layer: The layer.
    """
    replica = context.replica()
    return original(layer) if replica is None else list(replica.layer_losses.get(id(layer), ()))


def clear_losses(original: Callable[..., Any], layer: Any) -> None:
    """Forgets what a layer and the layers inside it added.

    Args:
        original: Keras's ``Layer._clear_losses``.
        layer: The layer.
    """
    replica = context.replica()
    if replica is None:
        original(layer)
        return
    # Keras clears before the outermost call of a step, and a replica's step has one model: all go.
    for inner in layer._flatten_layers():
        replica.layer_losses.pop(id(inner), None)
