"""Training in passes: how many rows a pass has, and which models are refused.

After `kerasdist.config.set_most_examples_at_once`, a replica's step runs in passes. Each pass calls
the model for some of the replica's rows. The trainer of the backend makes the passes. If a
layer depends on rows outside of the pass, or keeps state from one call to the next, passes give
other results than one call for all rows. Training a model with such a layer raises an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import keras
import numpy as np

from kerasdist import config, keras_compat
from kerasdist.backends.base.model_trainer import TrainerLike
from kerasdist.core.context import current
from kerasdist.core.structures import flatten
from kerasdist.errors import UnsupportedError


def most_rows(trainer: TrainerLike) -> int | None:
    """Returns how many rows a pass may have at most; None if a pass has all rows of a replica."""
    if current.trial is not None and not current.trial.makes_passes:
        return None
    most = config.most_examples_at_once()
    return trainer.most_rows if most == "auto" else most


def rows_of(args: Sequence[Any]) -> int:
    """Returns the number of examples in the arguments of a call; 0 if it is not known."""
    leaves = [one for one in flatten(list(args[:1])) if one is not None]
    sizes = {one.shape[0] if np.ndim(one) else 0 for one in leaves if hasattr(one, "shape")}
    return sizes.pop() if len(sizes) == 1 else 0


def require_rows_alone(model: Any) -> None:
    """Refuses layers that depend on rows outside of a pass, and layers that add losses.

    This check runs before a step runs. `require_nothing_kept` checks what a call has changed.
    """
    for layer in keras_compat.flat_layers(model):
        if isinstance(layer, keras.layers.BatchNormalization) and layer.trainable:
            raise refused(f"layer={layer.name!r}, which normalizes by the whole global batch")
        if layer.activity_regularizer is not None:
            raise refused(f"layer={layer.name!r}, whose activity_regularizer adds a loss")
        if config.draws() == "global" and hasattr(layer, "seed_generator"):
            raise refused(f"layer={layer.name!r}, and set_draws('global')")


def require_nothing_kept(
    model: Any,
    changed: Iterable[bool],
    losses: Sequence[Any],
    metrics: Sequence[keras.Variable] = (),
) -> None:
    """Raises an error if a call of the model has changed state, such as a seed, or added a loss.

    `changed` has one entry for each non-trainable variable of the model, followed by one for each
    variable in `metrics`: whether the call has changed this variable.
    """
    state = [*model.non_trainable_variables, *metrics]
    for variable, is_changed in zip(state, changed, strict=True):
        if is_changed:
            raise refused(f"a call that changes variable={variable.path!r}")
    if len(losses) > sum(one.regularizer is not None for one in model.trainable_weights):
        raise refused("a layer that adds a loss of the rows that it gets")


def refused(what: str) -> UnsupportedError:
    """Returns the error for a layer or loss that does not work in passes."""
    return UnsupportedError(
        "Expected a model that computes each example by itself, for "
        f"kerasdist.config.set_most_examples_at_once. Received: {what}. Take a smaller batch, or "
        "keras.RematScope."
    )
