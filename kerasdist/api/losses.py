"""Losses for custom loops, scaled so that their sum over the replicas is the global loss."""

from __future__ import annotations

from typing import Any

from keras import backend

from kerasdist.core import context
from kerasdist.core.structures import flatten
from kerasdist.errors import ScopeError
from kerasdist.keras_compat import ops


def compute_average_loss(
    per_example_loss: object, sample_weight: object = None, global_batch_size: object = None
) -> Any:
    """Returns a replica's contribution to the mean loss of the global batch.

    The sum of these contributions over the replicas is the mean over all examples, and
    ``optimizer.apply`` sums the gradients over the replicas in the same way. If the losses have
    more than one axis, the loss of an example is the sum along all axes but the first. If you want
    the mean along these axes, compute the mean before the call.

    Example::

        def replica_loss(batch):
            losses = keras.losses.mean_squared_error(batch[1], model(batch[0]))
            return kd.compute_average_loss(losses, global_batch_size=64)

    Args:
        per_example_loss: Losses of this replica's examples, of shape ``(n, ...)``.
        sample_weight: Weights that can be broadcast to the losses, or None.
        global_batch_size: Number of examples in the global batch, as an int or an integer scalar
            tensor. None: the number of this replica's examples times the number of replicas, which
            is wrong if the batch cannot be divided evenly.

    Returns:
        A scalar of the type of the losses; 0 for an empty global batch.

    Raises:
        ScopeError: In cross-replica context, if `global_batch_size` is None.
        ValueError: If `global_batch_size` is negative or not an integer, or the losses are a
            scalar.

    Source: https://www.tensorflow.org/api_docs/python/tf/nn/compute_average_loss
    """
    losses = ops.convert_to_tensor(per_example_loss)
    dtype = losses.dtype
    if len(losses.shape) == 0:
        raise ValueError(
            "Expected one loss for each example, so that the sum counts them all. Received: "
            "per_example_loss of shape (). Ask the loss for them: reduction='none'."
        )
    if sample_weight is not None:
        weights = ops.cast(ops.convert_to_tensor(sample_weight), dtype)
        missing = len(losses.shape) - len(weights.shape)
        losses = losses * ops.reshape(weights, (*ops.shape(weights), *(1,) * missing))
    if global_batch_size is None:
        global_batch_size = ops.shape(losses)[0] * _replicas("compute_average_loss")
    elif isinstance(global_batch_size, float) or (
        isinstance(global_batch_size, int) and global_batch_size < 0
    ):
        raise ValueError(
            "Expected global_batch_size to be an integer, not negative. "
            f"Received: global_batch_size={global_batch_size!r}."
        )
    total = ops.sum(losses)
    is_float = backend.is_float_dtype(backend.standardize_dtype(dtype))
    if isinstance(global_batch_size, int) and global_batch_size > 0 and is_float:
        # A single division is used here, because more operations slow down a short step.
        return total / global_batch_size
    # `divide_no_nan` is not used, because on PyTorch it turns float64 into float32 (Keras 3.15).
    size = ops.cast(global_batch_size, dtype)
    quotient = total / ops.maximum(size, ops.ones_like(size))
    return ops.where(size > 0, quotient, ops.zeros_like(quotient))


def scale_regularization_loss(regularization_loss: object) -> Any:
    """Divides a regularization loss, equal on all replicas, by the number of replicas.

    Example::

        def replica_loss(losses):
            penalty = kd.scale_regularization_loss(model.losses)
            return kd.compute_average_loss(losses, global_batch_size=64) + penalty

    Args:
        regularization_loss: A tensor, or a list of tensors, such as ``model.losses``.

    Returns:
        A scalar tensor.

    Raises:
        ScopeError: In cross-replica context.

    Source: https://www.tensorflow.org/api_docs/python/tf/nn/scale_regularization_loss
    """
    replicas = _replicas("scale_regularization_loss")
    return sum(ops.sum(one) for one in flatten(regularization_loss)) / replicas


def _replicas(call: str) -> int:
    here = context.replica_context_in_force()
    if here is None:
        raise ScopeError(
            f"Expected {call} in replica context. Received: a call in cross-replica context. Call "
            "it in the function that strategy.run runs."
        )
    return here.num_replicas_in_sync
