"""Divides a global batch into one local batch per replica, and joins the replicas' outputs.

Keras's ``apply_mask`` ends with ``sample_weight *= float_mask``. On PyTorch this operation changes
the batch's sample weights in place. So code that reads the weights later in the step, such as a
weighted metric, gets masked weights. If the loss is a mean, the weights are also multiplied by
``total / valid``, the number of the mask's elements divided by the number of its true elements
(seen in Keras 3.15). `_apply_mask` does the same on each replica. But it computes the factor over
the global batch, because only then do the numbers match those of one device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, final

import keras
import numpy as np
import torch

from kerasdist import keras_compat
from kerasdist.api.replica_context import LocalBatch
from kerasdist.backends.torch.replica.placing import move
from kerasdist.core.context import current
from kerasdist.core.structures import map_leaves
from kerasdist.input.sharding import (
    WorkerShard,
    bounds_of_replica,
    examples,
    has_rows,
    with_weights_in_rows,
)

_MEANS = ("sum_over_batch_size", "mean")


@final
@dataclass(frozen=True, eq=False)
class Part:
    """One replica's input for a step.

    Attributes:
        argument: The argument for the replica's step function, such as the replica's rows.
        local_batch: Which part of the global batch the replica holds, in `fit`, `evaluate` and
            `predict`; None in a custom loop.
    """

    argument: Any
    local_batch: LocalBatch | None = None

    @property
    def weight(self) -> float:
        """The factor for this replica's values in sums: in `fit` its fraction of rows, else 1."""
        return 1.0 if self.local_batch is None else self.local_batch.weight


def divide(batch: object, replica_set: Any) -> list[Part] | None:
    """Cuts a batch into consecutive local batches of sizes as equal as possible.

    Nones and scalars go to every replica unchanged. If one process has all replicas, a batch with
    fewer examples than replicas is cut into single examples, and the last replicas get none.

    Args:
        batch: A global batch, or a `WorkerShard` with this worker's rows of a global batch.
        replica_set: The replicas, to whose devices the local batches are copied.

    Returns:
        One `Part` for each replica of this process that gets examples. None if the batch is not
        divided: if it has no array, if it has fewer than two examples, or if, in a job, it has
        fewer examples than there are replicas.
    """
    devices: Sequence[torch.device] = replica_set.torch_devices
    if isinstance(batch, WorkerShard):
        local_batch = LocalBatch(batch.size, batch.total, batch.size / batch.total)
        moved_rows = map_leaves(lambda leaf: move(devices[0], _tensor(leaf)), batch.rows)
        return [Part(moved_rows, local_batch)]
    batch = with_weights_in_rows(batch, _tensor)
    total, replicas, local = examples(batch), replica_set.num_replicas, replica_set.local_replicas
    if total < (2 if len(local) == replicas else replicas):
        return None
    count = min(replicas, total)
    bounds = [bounds_of_replica(total, count, one) for one in local if one < count]
    return [
        Part(
            map_leaves(partial(_cut, device, begin, end), batch),
            LocalBatch(end - begin, total, (end - begin) / total),
        )
        for (begin, end), device in zip(bounds, devices, strict=False)
    ]


def _tensor(leaf: object) -> Any:
    return leaf if leaf is None else keras_compat.ops.convert_to_tensor(leaf)


def _cut(device: torch.device, begin: int, end: int, leaf: Any) -> Any:
    """Returns the examples from `begin` to `end`, on a device."""
    if has_rows(leaf):
        leaf = leaf[begin:end]
        # Slices of a tensor share its version counter. So if Keras changed one replica's mask in
        # place, torch would refuse the backward pass of another replica. `leaf.data` is a tensor
        # with a version counter of its own.
        if isinstance(leaf, torch.Tensor) and not leaf.requires_grad:
            leaf = leaf.data
    return move(device, leaf)


def join(outputs: Sequence[Any]) -> Any:
    """Concatenates predictions of several replicas or of several batches."""
    if len(outputs) == 1:
        return outputs[0]
    return keras.tree.map_structure(lambda *parts: _joined(parts), *outputs)


def _joined(parts: Sequence[Any]) -> Any:
    if not has_rows(parts[0]):
        return parts[0]  # None, or a scalar, which has no rows
    if all(isinstance(part, torch.Tensor) for part in parts):
        return torch.cat([part.to(parts[0].device) for part in parts])
    return keras_compat.ops.concatenate(parts)


@cache
def install() -> None:
    """Installs the hook for masked sample weights into Keras, once per process."""
    keras_compat.install(apply_mask=_apply_mask)


def _apply_mask(
    original: Callable[..., torch.Tensor],
    sample_weight: Any,
    mask: torch.Tensor | None,
    dtype: str | None,
    reduction: str,
) -> torch.Tensor | None:
    replica = current.fit_replica
    if mask is not None and keras_compat.VERSION < (3, 15):
        mask = keras_compat.ops.copy(mask)  # older versions change the mask itself
    if replica is None or sample_weight is None or mask is None:
        return original(sample_weight, mask, dtype=dtype, reduction=reduction)
    # An array is copied, because the weights that a user gives to `train_on_batch` must not change.
    if not isinstance(sample_weight, torch.Tensor):
        sample_weight = keras_compat.ops.convert_to_tensor(np.array(sample_weight))
    # The loss gets a clone, because its backward pass needs the weights as they are now. The
    # batch's own weights change below.
    merged = original(sample_weight.clone(), mask, dtype=dtype, reduction=reduction)
    with torch.no_grad():
        float_mask = mask.to(merged.dtype)
        if reduction in _MEANS:
            counts = torch.stack([float_mask.new_full((), math.prod(mask.shape)), float_mask.sum()])
            [[total, valid]] = replica.collectives.all_sum([counts])
            float_mask = torch.where(mask.bool(), torch.where(valid > 0, total / valid, 0.0), 0.0)
        if merged.dtype == sample_weight.dtype:  # Keras leaves weights of another type unchanged
            sample_weight *= float_mask.reshape(sample_weight.shape)
    return merged
