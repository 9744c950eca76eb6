"""Calls a model in several passes, each with some rows of a batch, to save memory.

Of each pass, only the inputs and the outputs stay in memory until the backward pass, which then
runs the pass once more. The code that calls the model gets the outputs for all rows, so losses,
metrics and updates are the same as after one call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import keras
import numpy as np
import torch

from kerasdist import keras_compat
from kerasdist.backends.base.model_trainer import require_trainer
from kerasdist.backends.base.user_places import kept_state_of
from kerasdist.backends.torch.replica.placing import Version
from kerasdist.core.structures import flatten, map_leaves, pack
from kerasdist.training import passes


def calls(
    model: Any, call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], most: int
) -> Any:
    """Calls a model in as few passes as possible, each with at most `most` rows."""
    count = passes.rows_of(args)
    number = -(-count // most)
    is_symbolic = any(getattr(one, "is_meta", False) for one in flatten(list(args[:1])))
    if number <= 1 or is_symbolic:
        return call(*args, **kwargs)
    require_trainer(model).require_passes()
    # The passes have sizes as equal as possible, because calls with equal shapes reuse kernels and
    # memory.
    ends = [count * done // number for done in range(number + 1)]
    # The keyword arguments are given in a dict, as the last positional argument, because `remat` in
    # Keras 3.12 drops keyword arguments.
    again: Any = keras.remat(lambda *given: call(*given[:-1], **given[-1]))
    kept = kept_state_of(model)
    if kept:
        kept.begin(1)
    metrics = [each for one in keras_compat.attached_metrics(model) for each in one.variables]
    state = [*model.non_trainable_variables, *metrics]
    before = [Version(one.value) for one in state]
    parts: list[Any] = []
    for begin, end in pairwise(ends):
        part = again(*_of_rows(args, begin, end, count), _of_rows(kwargs, begin, end, count))
        if not parts:
            pairs = zip(before, state, strict=True)
            changed = [not was.is_of(one.value) for was, one in pairs]
            passes.require_nothing_kept(model, changed, model.losses, metrics)
            if kept and kept.has_new_tensors():
                raise passes.refused("code that keeps a tensor in an attribute, a list or a name")
        parts.append(part)
    return _joined(parts, [end - begin for begin, end in pairwise(ends)])


def _of_rows(given: Any, begin: int, end: int, count: int) -> Any:
    """Cuts each tensor with one row per example to the rows `begin` to `end`, and its mask too."""

    def rows(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor | np.ndarray) or leaf.shape[:1] != (count,):
            return leaf
        return keras_compat.keep_keras_mask(leaf, leaf[begin:end], lambda mask: mask[begin:end])

    return map_leaves(rows, given)


def _joined(parts: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Returns the outputs of all passes, concatenated, with their masks."""
    leaves: list[Any] = []
    for column in zip(*map(flatten, parts), strict=True):
        if column[0] is None:
            leaves.append(None)
            continue
        if any(not one.ndim or len(one) != size for one, size in zip(column, sizes, strict=True)):
            raise passes.refused(
                f"an output of shape {tuple(column[0].shape)} for {sizes[0]} examples"
            )
        whole = torch.cat(list(column))
        masks: list[Any] = [keras_compat.get_keras_mask(one) for one in column]
        if masks[0] is not None:
            keras_compat.set_keras_mask(whole, torch.cat(masks))
        leaves.append(whole)
    return pack(parts[0], leaves)
