"""The logs of a step: the metrics of the whole batch, whatever the replicas returned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from kerasdist.keras_compat import ops
from kerasdist.training import numerics


def global_logs(
    replica_logs: Sequence[Any],
    replica_results: Sequence[dict[str, Any]],
    global_results: dict[str, Any],
    weights: Sequence[Any],
) -> Any:
    """Combines the logs of the replicas' steps.

    A custom `train_step` may return results of metrics, which a replica knows only for its own
    rows, or other values, such as the loss of the batch. An entry that equals the replica's own
    result of the metric of that name becomes the global result. Any other entry is taken for a mean
    over the replica's examples.

    Returns the logs of one device's step, or None if the replicas returned None.
    """
    return _entry("", replica_logs, replica_results, global_results, weights)


def _entry(
    name: str,
    parts: Sequence[Any],
    replica_results: Sequence[dict[str, Any]],
    global_results: dict[str, Any],
    weights: Sequence[Any],
) -> Any:
    if isinstance(parts[0], dict):  # the logs, or the result of Keras's own compiled metrics
        return {
            inner: _entry(
                inner, [part[inner] for part in parts], replica_results, global_results, weights
            )
            for inner in parts[0]
        }
    mean: Any = keras.tree.map_structure(lambda *leaves: _mean(leaves, weights), *parts)
    if name not in global_results or keras.tree.is_nested(parts[0]):
        return mean
    is_result = ops.equal(parts[0], replica_results[0][name])
    return ops.where(is_result, ops.cast(global_results[name], mean.dtype), mean)


def _mean(parts: Sequence[Any], weights: Sequence[Any]) -> Any:
    if parts[0] is None:
        return None
    tensors: list[Any] = [ops.convert_to_tensor(part) for part in parts]
    if not keras.backend.is_float_dtype(keras.backend.standardize_dtype(tensors[0].dtype)):
        return tensors[0]
    return sum(map(numerics.weighted, tensors, weights))
