"""The division of global batches into the replicas' pieces, inside the compiled step."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from kerasdist.errors import InputError
from kerasdist.input import sharding
from kerasdist.replica_context import BatchShare

# The name of the operation that divides a batch, by which its errors are recognised.
_DIVISION = "kerasdist_division_of_the_global_batch"
# How TensorFlow names the operation that failed. In ``[[name/_30]]`` it lists others, which waited.
_FAILED_DIVISION = re.compile(rf"\{{\{{node [^}}]*{_DIVISION}[^}}]*\}}\}}")


@dataclass(frozen=True)
class Piece:
    """What one replica gets of a global batch.

    Attributes:
        data: Its rows, in the structure of the batch.
        share: How many they are.
    """

    data: Any
    share: BatchShare


def pieces(batch: Any, replicas: int) -> list[Piece]:
    """Divides a global batch into consecutive pieces, the longer ones first.

    Args:
        batch: Tensors in any structure, sparse and ragged ones too. An empty ``tf.experimental.
            Optional``, which is how a dataset says None, becomes None. A scalar goes to all.
        replicas: How many pieces to make.

    Returns:
        One piece a replica. Where the batch may be smaller than `replicas`, or its size is known in
        the step only, shares are tensors, and the static size of a piece is unknown.
    """
    leaves = [_none_for_optional(leaf) for leaf in keras.tree.flatten(batch)]
    return _pieces(batch, leaves, _division(leaves, replicas))


class OwnRows(NamedTuple):
    """What a worker needs of a global batch.

    Attributes:
        rows: The rows of its own replicas, in the structure of the batch.
        total: Number of examples in the batch.
    """

    rows: Any
    total: tf.Tensor


def own_rows(batch: Any, replicas: int, own: range) -> OwnRows:
    """Takes a worker's rows out of a global batch.

    Args:
        batch: Tensors in any structure, as `pieces` takes them.
        replicas: How many replicas there are on all workers.
        own: The worker's own.
    """
    leaves = keras.tree.flatten(batch)
    batched = _batched([_none_for_optional(leaf) for leaf in leaves])
    total = _rows(batched[0])
    begin, end = (_begin(replica, total, replicas) for replica in (own.start, own.stop))
    # Three replicas of which the second one's piece is meant.
    division = _Division([begin, end - begin, total - end], [0, begin, end], [_NOBODYS] * 3)

    def rows(leaf: Any) -> Any:
        return leaf if isinstance(leaf, tf.experimental.Optional) else division.parts(leaf)[1]

    return OwnRows(keras.tree.pack_sequence_as(batch, [rows(leaf) for leaf in leaves]), total)


def own_numbers(numbers: tf.Tensor, replicas: int, own: range) -> tf.Tensor:
    """Takes those of a worker's rows out of the numbers of a global batch's rows.

    Args:
        numbers: The numbers.
        replicas: How many replicas there are on all workers.
        own: The worker's own.
    """
    total = numbers.shape[0]
    if total is None:
        total = tf.shape(numbers)[0]
    return numbers[_begin(own.start, total, replicas) : _begin(own.stop, total, replicas)]


def pieces_of_own(batch: OwnRows, replicas_here: int) -> list[Piece]:
    """Divides a worker's rows into the pieces of its replicas.

    Args:
        batch: What `own_rows` returned, or any rows of which the batch is made on all workers.
        replicas_here: How many replicas the worker has.
    """
    leaves = [_none_for_optional(leaf) for leaf in keras.tree.flatten(batch.rows)]
    size = _rows(_batched(leaves)[0])
    return _pieces(batch.rows, leaves, _dynamic_division(size, batch.total, replicas_here))


# The share of what is cut off for no replica.
_NOBODYS = BatchShare(0, 0, 0.0)


@contextmanager
def division_errors() -> Iterator[None]:
    """Says in our words that a batch could not be divided.

    Raises:
        InputError: If a tensor of a batch has another number of rows than the first one.
    """
    try:
        yield
    except tf.errors.InvalidArgumentError as error:
        if not _FAILED_DIVISION.search(error.message):
            raise
        # Keras raises it again ``from None``: its cause is shown by its text alone.
        raise InputError(
            "Expected tensors with the same number of examples in a batch. Received: another "
            "number than in the first tensor. Let the data source yield as many targets and "
            f"weights as inputs. TensorFlow's message: {error.message}"
        ) from error


def _pieces(batch: Any, leaves: list[Any], division: _Division) -> list[Piece]:
    parts = [division.parts(leaf) for leaf in leaves]
    return [
        Piece(keras.tree.pack_sequence_as(batch, [part[index] for part in parts]), share)
        for index, share in enumerate(division.shares)
    ]


def _none_for_optional(leaf: Any) -> Any:
    return None if isinstance(leaf, tf.experimental.Optional) else leaf


@dataclass(frozen=True)
class _Division:
    """Where a batch is cut.

    Attributes:
        sizes: How many rows each replica gets: integers, or an int32 tensor of one dimension.
        begins: The first row of each, likewise.
        shares: What the replicas are told.
    """

    sizes: Any
    begins: Any
    shares: Sequence[BatchShare]

    def parts(self, leaf: Any) -> list[Any]:
        """The pieces of one tensor."""
        replicas = range(len(self.shares))
        if leaf is None or leaf.shape.rank == 0:
            return [leaf for _ in replicas]
        if isinstance(leaf, tf.SparseTensor):
            return [_sparse_rows(leaf, self.begins[r], self.sizes[r]) for r in replicas]
        if isinstance(leaf, tf.RaggedTensor):
            return [leaf[self.begins[r] : self.begins[r] + self.sizes[r]] for r in replicas]
        return tf.split(leaf, self.sizes, num=len(replicas), name=_DIVISION)


def _sparse_rows(tensor: tf.SparseTensor, begin: Any, size: Any) -> tf.SparseTensor:
    width = tf.shape(tensor, out_type=tf.int64)[1:]
    start = tf.concat([[tf.cast(begin, tf.int64)], tf.zeros_like(width)], 0)
    rows = tf.sparse.slice(tensor, start, tf.concat([[tf.cast(size, tf.int64)], width], 0))
    rows.set_shape([None, *tensor.shape[1:]])
    return rows


def _division(leaves: list[Any], replicas: int) -> _Division:
    batched = _batched(leaves)
    static = _static_sizes(batched)
    [size] = static if len(static) == 1 else [None]
    # Eagerly every size is known; in a graph a piece without rows must not look like one for good:
    # Keras reads losses of the static shape (0,) as something else than a batch.
    if size is not None and (size >= replicas or tf.executing_eagerly()):
        return _static_division(size, replicas)
    rows = _rows(batched[0])
    return _dynamic_division(rows, rows, replicas)


def _batched(leaves: list[Any]) -> list[Any]:
    batched = [leaf for leaf in leaves if leaf is not None and leaf.shape.rank != 0]
    if not batched:
        raise InputError(
            "Expected a batch with at least one tensor that has a batch dimension. Received: "
            f"batch={leaves}. Let the data source yield batches of examples."
        )
    if len(_static_sizes(batched) - {None}) > 1:
        raise InputError(
            "Expected tensors with the same number of examples in a batch. Received: "
            f"shapes={[tuple(leaf.shape) for leaf in batched]}. Let the data source yield as many "
            "targets and weights as inputs."
        )
    return batched


def _static_sizes(batched: list[Any]) -> set[int | None]:
    return {leaf.shape[0] for leaf in batched if leaf.shape.rank is not None}


def _rows(leaf: Any) -> Any:
    if isinstance(leaf, tf.RaggedTensor):
        rows = leaf.nrows(out_type=tf.int32)
    else:
        rows = tf.shape(leaf, out_type=tf.int32)[0]
    return tf.raw_ops.PlaceholderWithDefault(input=rows, shape=[])


def _static_division(total: int, replicas: int) -> _Division:
    sizes = sharding.piece_sizes(total, replicas)
    weights = sharding.weights(total, replicas)
    every_replica_has_rows = total >= replicas
    shares = [
        BatchShare(size, total, weight if every_replica_has_rows else _scalar(weight))
        for size, weight in zip(sizes, weights, strict=True)
    ]
    begins = [begin for begin, _ in sharding.piece_bounds(total, replicas)]
    return _Division(sizes, begins, shares)


def _dynamic_division(rows: Any, total: Any, replicas: int) -> _Division:
    sizes, begins = _bounds(rows, replicas)
    dtype = _weight_dtype()
    weights = tf.math.divide_no_nan(tf.cast(sizes, dtype), tf.cast(total, dtype))
    shares = [
        BatchShare(size, total, weight)
        for size, weight in zip(tf.unstack(sizes), tf.unstack(weights), strict=True)
    ]
    return _Division(sizes, begins, shares)


def _bounds(total: Any, replicas: int) -> tuple[Any, Any]:
    """The arithmetic of `sharding.piece_bounds`, on tensors: sizes and begins."""
    index = tf.range(replicas)
    rest = total % replicas
    sizes = total // replicas + tf.cast(index < rest, tf.int32)
    return sizes, index * (total // replicas) + tf.minimum(index, rest)


def _begin(replica: int, total: Any, replicas: int) -> Any:
    """One of those beginnings, or the end of all, with as few operations as can be."""
    if replica in (0, replicas):
        return total if replica else 0
    share, rest = total // replicas, total % replicas
    least = min if isinstance(rest, int) else tf.minimum
    return replica * share + least(replica, rest)


def _scalar(weight: float) -> tf.Tensor:
    return tf.constant(weight, _weight_dtype())


def _weight_dtype() -> tf.DType:
    # float32 would spoil the last digits of a float64 model.
    return tf.float64 if keras.config.floatx() == "float64" else tf.float32
