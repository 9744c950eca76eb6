"""What a step reports: the metrics of the whole batch, whatever the replicas returned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from kerasdist.keras_seam import ops
from kerasdist.training import numerics


def global_logs(
    replica_logs: Sequence[Any],
    replica_results: Sequence[dict[str, Any]],
    global_results: dict[str, Any],
    weights: Sequence[Any],
) -> Any:
    """Combines what the replicas' steps returned.

    A custom `train_step` may return results of metrics, which a replica knows only for its own
    rows, or values of its own, such as the loss of the batch. An entry that equals the replica's
    own result of the metric of that name is that metric's; it is replaced by the global result. Any
    other entry is taken for a mean over the replica's examples.

    Args:
        replica_logs: What each replica's step returned: a dict of scalars, or anything of scalars.
        replica_results: The results of the metrics in each replica, after its step.
        global_results: The results of the metrics after the step, over all replicas.
        weights: Each replica's weight.

    Returns:
        What one device's step would have returned, or None if the replicas returned None.
    """
    first = replica_logs[0]
    if not isinstance(first, dict):
        return keras.tree.map_structure(lambda *parts: _mean(parts, weights), *replica_logs)
    merged = {}
    for name, value in first.items():
        parts = [logs[name] for logs in replica_logs]
        mean: Any = keras.tree.map_structure(lambda *leaves: _mean(leaves, weights), *parts)
        if name in global_results and not keras.tree.is_nested(value):
            is_result = ops.equal(value, replica_results[0][name])
            mean = ops.where(is_result, ops.cast(global_results[name], mean.dtype), mean)
        merged[name] = mean
    return merged


def _mean(parts: Sequence[Any], weights: Sequence[Any]) -> Any:
    if parts[0] is None:
        return None
    tensors: list[Any] = [ops.convert_to_tensor(part) for part in parts]
    if not keras.backend.is_float_dtype(keras.backend.standardize_dtype(tensors[0].dtype)):
        return tensors[0]
    return sum(map(numerics.weighted, tensors, weights))
