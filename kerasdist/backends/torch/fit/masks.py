"""Applies a mask to sample weights, which Keras on PyTorch changes in place.

Keras's ``apply_mask`` ends with ``sample_weight *= float_mask``. On PyTorch that changes the
batch's own weights, so code that reads them later in the step, such as a weighted metric, gets them
masked and, for a mean, times ``total / valid`` (seen in Keras 3.15). To give one device's numbers,
this factor must be computed over the global batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from kerasdist import keras_compat
from kerasdist.api.replica_context import one_device_replica

_MEANS = ("sum_over_batch_size", "mean")


@cache
def install() -> None:
    """Puts the hook into Keras."""
    keras_compat.install(apply_mask=_apply_mask)


def _apply_mask(
    original: Callable[..., Any], sample_weight: Any, mask: Any, dtype: Any, reduction: str
) -> Any:
    replica = one_device_replica()
    if replica is None or sample_weight is None or mask is None:
        return original(sample_weight, mask, dtype=dtype, reduction=reduction)
    # A copy, which the loss keeps for its backward pass; the batch's own weights change below.
    merged = original(sample_weight.clone(), mask, dtype=dtype, reduction=reduction)
    with torch.no_grad():
        float_mask = mask.to(merged.dtype)
        if reduction in _MEANS:
            counts = torch.stack([float_mask.new_full((), math.prod(mask.shape)), float_mask.sum()])
            [[total, valid]] = replica.collectives.all_sum([counts])
            float_mask = torch.where(mask.bool(), torch.where(valid > 0, total / valid, 0.0), 0.0)
        if merged.dtype == sample_weight.dtype:  # Keras casts others to a copy
            sample_weight *= float_mask.reshape(sample_weight.shape)
    return merged
