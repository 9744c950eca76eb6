"""The arithmetic of contract C1, for backends on which each replica runs its own program.

C1 says that `fit` gives the results of one device. User code is written for one device, so the loss
of a replica is a mean over the replica's own examples. Replica ``r`` holds ``n_r`` of the ``N``
examples of the global batch. All functions of this module serve one equation::

    global loss = sum over r of w_r * loss_r,    w_r = n_r / N

Gradients are combined with the same weights (`weighted`), so that their sum is the gradient of the
global loss. A mean over all examples, or a term that does not depend on the batch, needs no change.
A loss with another divisor ``d_r`` (valid steps of a mask, a sum of sample weights) is scaled by
``(d_r / D) / w_r``, where ``D`` is the sum of all ``d_r``. A loss that is a sum is scaled by ``1 /
w_r`` (`reduce_loss`). The derivation is in docs/numerics.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras

from kerasdist import keras_compat
from kerasdist.core.context import ReplicaLike, current
from kerasdist.core.structures import flatten, pack
from kerasdist.keras_compat import internals, ops

_MEANS = ("sum_over_batch_size", "mean")
_WEIGHTED_MEAN = "mean_with_sample_weight"


def weighted(gradient: Any, weight: Any) -> Any:
    """Returns a gradient times a replica's weight ``w_r``; 0 if the weight is 0, even for a NaN."""
    if isinstance(weight, float):
        return gradient * weight
    weight = ops.cast(weight, gradient.dtype)
    return ops.where(weight > 0, gradient, ops.zeros_like(gradient)) * weight


def weight_of_gradients(optimizer: keras.Optimizer, weight: object) -> Any:
    """Returns the factor by which a replica's gradients must still be multiplied.

    This is the replica's weight, its fraction of the examples. But if there is a
    LossScaleOptimizer, the loss has already been multiplied by the weight. Then the result is 1, or
    0 on a replica without examples.
    """
    # Gradients of an empty replica may be NaN, so they are still multiplied by 0 (see `weighted`).
    return presence(weight) if isinstance(optimizer, keras_compat.LossScaleOptimizer) else weight


def presence(weight: Any) -> Any:
    """Returns 1 for a replica with examples, 0 for an empty one."""
    return float(weight > 0) if isinstance(weight, float) else ops.cast(weight > 0, weight.dtype)


def per_weight(value: Any, weight: Any) -> Any:
    """Returns ``value / weight``, or 0 if the weight is 0."""
    if isinstance(weight, float):
        return value / weight
    return ops.divide_no_nan(value, ops.cast(weight, value.dtype))


def mean_over_rows(
    results: Sequence[Any],
    weights: Sequence[Any],
    replicas: Iterable[int],
    sums: Callable[[list[list[Any]]], Iterable[Any]],
) -> Any:
    """Combines the replicas' results of a step: floats by the weighted mean over all replicas.

    For numbers of other types, the result of replica 0 is returned. For strings and None, the
    result of this process's first replica is returned.

    Args:
        results: The results of this process's replicas, such as their logs.
        weights: For each of these replicas, its fraction of the examples of the global batch.
        replicas: The numbers of these replicas.
        sums: A function that adds values over all replicas. It gets lists, each with the terms of
            this process's replicas, and returns one sum per list.
    """
    columns = list(zip(*map(flatten, results), strict=True))
    combined: list[Any] = [parts[0] for parts in columns]
    terms: dict[int, list[Any]] = {}
    for index, parts in enumerate(columns):
        if parts[0] is None or isinstance(parts[0], str):
            continue
        tensors = [ops.stop_gradient(ops.convert_to_tensor(one)) for one in parts]
        combined[index], dtype = tensors[0], keras.backend.standardize_dtype(tensors[0].dtype)
        if keras.backend.is_float_dtype(dtype):
            wide = [ops.cast(one, keras.backend.result_type(dtype, "float32")) for one in tensors]
            terms[index] = list(map(weighted, wide, weights))
        elif dtype != "string":
            wide = [ops.cast(one, dtype if "complex" in dtype else "int64") for one in tensors]
            pairs = zip(replicas, wide, strict=False)
            terms[index] = [one if of == 0 else ops.zeros_like(one) for of, one in pairs]
    for index, total in zip(terms, sums(list(terms.values())), strict=True):
        combined[index] = ops.cast(total, combined[index].dtype)
    return pack(results[0], combined)


def call_loss(original: Callable[..., Any], loss: Any, y_true: Any, y_pred: Any) -> Any:
    """Calls a loss object that wraps a function, such as `keras.losses.Dice`.

    A function of Keras that mixes examples gets the rows of all replicas, so all replicas must make
    this call. Most functions that mix examples return one value for all rows. Only `circle` returns
    a value for each row; then the values of this replica's rows are returned.
    """
    replica = current.fit_replica
    if replica is None or getattr(loss.fn, "__name__", "") not in keras_compat.MIXING:
        return original(loss, y_true, y_pred)
    if not keras_compat.mixes_examples(loss.fn, internals.FUNCTION_ARGUMENTS.of(loss), y_pred):
        return original(loss, y_true, y_pred)
    values = original(loss, *gather_rows(replica, (y_true, y_pred)))
    if loss.fn is not keras.losses.circle:
        return internals.REDUCE_VALUES.value(values, None, loss.reduction)
    sizes = replica.collectives.all_stack(ops.cast(replica.local_batch.size, "int32"))
    begin = ops.sum(sizes[: replica.replica_id_in_sync_group])
    end = begin + replica.local_batch.size
    return keras_compat.keep_keras_mask(values, values[begin:end], lambda mask: mask[begin:end])


def gather_rows(replica: ReplicaLike, structure: object) -> Any:
    """Gathers the rows and masks of a structure's tensors. All replicas must call this function."""

    def gather(leaf: object) -> Any:
        if leaf is None or isinstance(leaf, str | bool | int | float):
            return leaf
        tensor = ops.convert_to_tensor(leaf)
        if len(tensor.shape) == 0:
            return tensor
        every = replica.collectives.all_gather(tensor)
        return keras_compat.keep_keras_mask(leaf, every, replica.collectives.all_gather)

    return keras.tree.map_structure(gather, structure)


def reduce_loss(  # noqa: PLR0917  Keras's parameters
    original: Callable[..., Any],
    values: Any,
    sample_weight: Any = None,
    mask: Any = None,
    reduction: str | None = "sum_over_batch_size",
    dtype: Any = None,
) -> Any:
    """Reduces a Keras loss so that the weighted mean over the replicas is the loss of one device.

    All replicas must call this function, because some reductions need the sum of the divisors.
    `values` has the shape ``(n, ...)``, with a value for each example or time step; a scalar counts
    as the mean of the replica's values.
    """
    replica = current.fit_replica
    if current.replica is not None and current.replica.num_replicas_in_sync > 1:
        keras_compat.require_scaling(in_fit=replica is not None)
    if replica is None:
        return original(values, sample_weight, mask, reduction, dtype)
    if mask is not None and sample_weight is not None:
        internals.APPLY_MASK.require()
    values = ops.convert_to_tensor(values, dtype=dtype)

    is_reduced = len(values.shape) == 0 and sample_weight is None and mask is None
    if reduction in (None, "none") or is_reduced:
        return original(values, sample_weight, mask, reduction, dtype)
    # A replica's sample weights may all be zero; before Keras 3.15, 0 / 0 has a NaN gradient on
    # PyTorch. So Keras only sums the losses here. Below, this sum is divided once, by the sum of
    # the sample weights of all replicas.
    divides_sum = reduction == _WEIGHTED_MEAN and not (sample_weight is None and mask is None)
    own_reduction = "sum" if divides_sum else reduction
    loss = original(values, sample_weight, mask, own_reduction, dtype)
    if len(loss.shape) > 0:
        loss = ops.sum(loss)  # for zero examples, Keras returns an array of shape (0,)
    weight = replica.local_batch.weight
    if reduction == "sum":
        return per_weight(loss, weight)
    divisor = _own_divisor(sample_weight, mask, reduction, loss.dtype)
    if divisor is None:
        return loss
    [total] = replica.collectives.all_sum([divisor])
    if divides_sum:
        return per_weight(ops.divide_no_nan(loss, total), weight)
    return per_weight(loss * ops.divide_no_nan(divisor, total), weight)


def _own_divisor(sample_weight: object, mask: object, reduction: str, dtype: object) -> Any:
    """Returns the sum by which Keras divides a replica's loss, such as the sum of sample weights.

    Returns None if Keras divides by the number of examples.
    """
    if reduction in _MEANS:
        return None if mask is None else ops.sum(ops.cast(mask, dtype))
    if sample_weight is None and mask is None:
        return None
    if sample_weight is not None:
        sample_weight = ops.convert_to_tensor(sample_weight, dtype=dtype)
    if mask is not None:
        mask = ops.convert_to_tensor(mask, dtype=dtype)
    merged = keras_compat.apply_mask(sample_weight, mask, dtype=dtype, reduction=reduction)
    return ops.stop_gradient(ops.sum(ops.cast(merged, dtype)))
