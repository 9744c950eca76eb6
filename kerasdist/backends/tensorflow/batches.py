"""The division of global batches into the replicas' pieces, inside the compiled step.

In `fit`, `evaluate` and `predict` a replica without example gets one row that stands in: a copy of
a real one, where there is one. Layers then never run on 0 rows, of which TensorFlow's convolutions
on the CPU return the wrong shape (seen with 2.21, oneDNN). The replica's share of the batch stays
0, so nothing that it computes counts (ADR 12).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
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
        data: Its rows, in the structure of the batch; a row that stands in, where it has none.
        share: How many of them count.
    """

    data: Any
    share: BatchShare


def pieces(batch: Any, replicas: int, *, stand_ins: bool) -> list[Piece]:
    """Divides a global batch into consecutive pieces, the longer ones first.

    Args:
        batch: Tensors in any structure, sparse and ragged ones too. An empty ``tf.experimental.
            Optional``, which is how a dataset says None, becomes None. A scalar goes to all.
        replicas: How many pieces to make.
        stand_ins: Whether a piece without example gets a row that stands in.

    Returns:
        One piece a replica. Where the batch may be smaller than `replicas`, or its size is known in
        the step only, shares are tensors, and the static size of a piece is unknown.
    """
    leaves = [none_for_optional(leaf) for leaf in keras.tree.flatten(batch)]
    return _pieces(batch, leaves, _division(leaves, replicas), stand_ins)


class OwnRows(NamedTuple):
    """What a worker needs of a global batch.

    Attributes:
        rows: The rows of its own replicas, in the structure of the batch; a row that stands in,
            where there are none.
        size: How many of them count, an int32 scalar tensor.
        total: Number of examples in the batch, likewise.
        beginnings: What `first_batches.beginnings_of_first` says of the first batch of an
            iteration; of others empty texts; and where other workers' batches are not compared,
            nothing.
    """

    rows: Any
    size: tf.Tensor
    total: tf.Tensor
    beginnings: Any = ()


def own_rows(batch: Any, replicas: int, own: range) -> OwnRows:
    """Takes a worker's rows out of a global batch.

    Args:
        batch: Tensors in any structure, as `pieces` takes them.
        replicas: How many replicas there are on all workers.
        own: The worker's own.
    """
    leaves = keras.tree.flatten(batch)
    batched = _batched([none_for_optional(leaf) for leaf in leaves])
    total = _rows(batched[0])
    begin, end = (_begin(replica, total, replicas) for replica in (own.start, own.stop))
    cut = _Cut([begin], [end]).with_stand_ins(total)

    def rows(leaf: Any) -> Any:
        if none_for_optional(leaf) is None or leaf.shape.rank == 0:
            return leaf
        return cut.parts(_checked(leaf, total))[0]

    own_part = keras.tree.pack_sequence_as(batch, [rows(leaf) for leaf in leaves])
    return OwnRows(own_part, tf.convert_to_tensor(end - begin), total)


def first_rows(batch: Any, count: int) -> Any:
    """Returns the first rows of a batch.

    Args:
        batch: Tensors in any structure, as `pieces` takes them.
        count: How many; as many there are.
    """
    cut = _Cut([0], [count])

    def rows(leaf: Any) -> Any:
        if none_for_optional(leaf) is None or leaf.shape.rank == 0:
            return leaf
        return cut.parts(leaf)[0]

    return keras.tree.map_structure(rows, batch)


def own_numbers(numbers: tf.Tensor, replicas: int, own: range) -> tuple[tf.Tensor, tf.Tensor]:
    """Takes those of a worker's rows out of the numbers of a global batch's rows.

    Args:
        numbers: The numbers, at least one.
        replicas: How many replicas there are on all workers.
        own: The worker's own.

    Returns:
        The numbers, or that of a row that stands in; and how many of them count.
    """
    total = numbers.shape[0]
    if total is None:
        total = tf.shape(numbers)[0]
    begin, end = (_begin(replica, total, replicas) for replica in (own.start, own.stop))
    [own_part] = _Cut([begin], [end]).with_stand_ins(total).parts(numbers)
    return own_part, tf.convert_to_tensor(end - begin)


def pieces_of_own(batch: OwnRows, replicas_here: int, *, stand_ins: bool) -> list[Piece]:
    """Divides a worker's rows into the pieces of its replicas.

    Args:
        batch: What `own_rows` returned, or any rows of which the batch is made on all workers.
        replicas_here: How many replicas the worker has.
        stand_ins: Whether a piece without example gets a row that stands in.
    """
    leaves = [none_for_optional(leaf) for leaf in keras.tree.flatten(batch.rows)]
    held = _rows(_batched(leaves)[0])
    division = _dynamic_division(batch.size, batch.total, held, replicas_here)
    return _pieces(batch.rows, leaves, division, stand_ins)


def counted_rows(value: Any, share: BatchShare) -> Any:
    """Returns those rows of a replica's tensor that count: none, where one stands in.

    Args:
        value: A dense, ragged or sparse tensor with the replica's rows, along axis 0.
        share: How many of them count.
    """
    if isinstance(share.weight, float):
        return value
    if isinstance(value, tf.SparseTensor):
        end = tf.where(share.size > 0, value.dense_shape[0], 0)
        return _sparse_rows(value, 0, end)
    return value[: tf.where(share.size > 0, _row_count(value), 0)]


def none_for_optional(leaf: Any) -> Any:
    """Returns None for an empty ``tf.experimental.Optional``, which is how a dataset says None.

    Args:
        leaf: A leaf of a batch.
    """
    return None if isinstance(leaf, tf.experimental.Optional) else leaf


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


def _pieces(batch: Any, leaves: list[Any], division: _Division, stand_ins: bool) -> list[Piece]:
    if stand_ins and not division.all_have_rows:
        division = replace(division, cut=division.cut.with_stand_ins(division.held))
    parts = [division.parts(leaf) for leaf in leaves]
    return [
        Piece(keras.tree.pack_sequence_as(batch, [part[index] for part in parts]), share)
        for index, share in enumerate(division.shares)
    ]


@dataclass(frozen=True)
class _Cut:
    """Which rows of a tensor make the pieces.

    Attributes:
        begins: The first row of each: integers, or scalar int32 tensors.
        ends: The row after the last one of each, likewise.
    """

    begins: Sequence[Any]
    ends: Sequence[Any]

    def parts(self, leaf: Any) -> list[Any]:
        """The pieces of a tensor, of a dense one without a copy of its rows."""
        rows = _sparse_rows if isinstance(leaf, tf.SparseTensor) else _rows_of
        return [rows(leaf, *bounds) for bounds in zip(self.begins, self.ends, strict=True)]

    def with_stand_ins(self, held: Any) -> _Cut:
        """The same, with one row for a piece without: the last one, as the last pieces have none.

        Args:
            held: How many rows there are to take from. Where there are none, no piece gets one.
        """
        least, most = (min, max) if isinstance(held, int) else (tf.minimum, tf.maximum)
        last = most(held - 1, 0)
        begins = [least(begin, last) for begin in self.begins]
        ends = [most(end, begin + 1) for begin, end in zip(begins, self.ends, strict=True)]
        return _Cut(begins, ends)


@dataclass(frozen=True)
class _Division:
    """How a batch is divided.

    Attributes:
        cut: Its pieces.
        shares: What the replicas are told.
        held: How many rows there are: an integer, or an int32 scalar tensor.
        all_have_rows: Whether it is known here that every replica has an example.
    """

    cut: _Cut
    shares: Sequence[BatchShare]
    held: Any
    all_have_rows: bool

    def parts(self, leaf: Any) -> list[Any]:
        """The pieces of one tensor."""
        if leaf is None or leaf.shape.rank == 0:
            return [leaf for _ in self.shares]
        return self.cut.parts(_checked(leaf, self.held))


def _checked(leaf: Any, rows: Any) -> Any:
    """Returns a tensor that fails in the step if it has another number of rows."""
    if isinstance(rows, int) or not isinstance(leaf, tf.Tensor):
        return leaf  # where it is known here, it has been compared
    # It compares, and hands on the rows without a copy. Of one part TensorFlow would make nothing.
    same, _ = tf.split(leaf, tf.stack([rows, 0]), num=2, name=_DIVISION)
    return same


def _rows_of(tensor: Any, begin: Any, end: Any) -> Any:
    return tensor[begin:end]


def _sparse_rows(tensor: tf.SparseTensor, begin: Any, end: Any) -> tf.SparseTensor:
    width = tf.shape(tensor, out_type=tf.int64)[1:]
    start = tf.concat([[tf.cast(begin, tf.int64)], tf.zeros_like(width)], 0)
    size = tf.concat([[tf.cast(end - begin, tf.int64)], width], 0)
    rows = tf.sparse.slice(tensor, start, size)
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
    return _dynamic_division(rows, rows, rows, replicas)


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
    return tf.raw_ops.PlaceholderWithDefault(input=_row_count(leaf), shape=[])


def _row_count(leaf: Any) -> tf.Tensor:
    if isinstance(leaf, tf.RaggedTensor):
        return leaf.nrows(out_type=tf.int32)
    return tf.shape(leaf, out_type=tf.int32)[0]


def _static_division(total: int, replicas: int) -> _Division:
    sizes = sharding.piece_sizes(total, replicas)
    weights = sharding.weights(total, replicas)
    every_replica_has_rows = total >= replicas
    shares = [
        BatchShare(size, total, weight if every_replica_has_rows else _scalar(weight))
        for size, weight in zip(sizes, weights, strict=True)
    ]
    begins, ends = zip(*sharding.piece_bounds(total, replicas), strict=True)
    return _Division(_Cut(begins, ends), shares, total, every_replica_has_rows)


def _dynamic_division(size: Any, total: Any, held: Any, replicas: int) -> _Division:
    """Divides rows of which the number is known in the step.

    Args:
        size: How many rows count.
        total: How many rows the batch has on all workers.
        held: How many rows there are here, with one that stands in.
        replicas: How many replicas there are here.
    """
    sizes, begins = _bounds(size, replicas)
    dtype = _weight_dtype()
    weights = tf.math.divide_no_nan(tf.cast(sizes, dtype), tf.cast(total, dtype))
    shares = [
        BatchShare(own, total, weight)
        for own, weight in zip(tf.unstack(sizes), tf.unstack(weights), strict=True)
    ]
    cut = _Cut(tf.unstack(begins), tf.unstack(begins + sizes))
    return _Division(cut, shares, held, all_have_rows=False)


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
