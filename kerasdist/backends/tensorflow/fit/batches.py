"""Divides global batches into the replicas' local batches, inside of the compiled step.

In `fit`, `evaluate` and `predict` a replica without rows gets one stand-in row, which is a copy of
a real row if there is one. So layers never run on 0 rows, for which TensorFlow's convolutions on
the CPU return a wrong shape (seen with TensorFlow 2.21 and oneDNN). The replica's weight stays 0,
so nothing that the replica computes counts (ADR 12).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from kerasdist.agreement.batches import BYTES, ELEMENTS, ROWS, names_of
from kerasdist.api.replica_context import LocalBatch
from kerasdist.errors import InputError
from kerasdist.input.sharding import bounds_of_replica

# The device on which batches are divided. Results for code outside of replicas are copied to it.
HOST = "/device:CPU:0"

# The name of the operation that divides a batch. Errors of this operation contain the name.
_DIVISION = "kerasdist_division_of_the_global_batch"
# Finds the failed operation in the message of TensorFlow's error. Operations that only waited for
# the failed operation have another form in the message: ``[[name/_30]]``.
_FAILED_DIVISION = re.compile(rf"\{{\{{node [^}}]*{_DIVISION}[^}}]*\}}\}}")


class Compared(NamedTuple):
    """The data of a global batch that the workers compare with each other.

    Attributes:
        first_rows: The first rows of each array, if the batch is the first of an iteration; else
            no rows.
        checksums: A checksum of each array, an int32 vector.
    """

    first_rows: Any
    checksums: tf.Tensor


class OwnRows(NamedTuple):
    """The rows of a global batch that a process, or one of its replicas, holds.

    Attributes:
        rows: The rows, in the structure of the batch; a stand-in row if there are none.
        size: How many of the rows count, as an int or an int32 scalar tensor.
        total: How many examples the global batch has, in the same type as `size`.
        compared: The result of `compared_in`; empty if workers do not compare batches.
    """

    rows: Any
    size: Any
    total: Any
    compared: Any = ()

    def local_batch(self) -> LocalBatch:
        """Returns the size and the weight of a replica's rows; a stand-in row does not count."""
        if isinstance(self.size, int) and self.size:
            return LocalBatch(self.size, self.total, self.size / self.total)
        # In a float64 model a float32 weight would cost the last digits of the results.
        dtype = tf.float64 if keras.config.floatx() == "float64" else tf.float32
        weight = tf.math.divide_no_nan(tf.cast(self.size, dtype), tf.cast(self.total, dtype))
        return LocalBatch(self.size, self.total, weight)


class PlacedBatch(NamedTuple):
    """A batch that is already on the devices: each device holds the rows of its own replica.

    Attributes:
        parts: For each device, the rows of its replica.
        total: How many examples the global batch has; 0 if that is not known when steps are traced.
    """

    parts: tuple[OwnRows, ...]
    total: int


def own_rows(batch: object, replicas: int, own: range) -> OwnRows:
    """Returns the rows of a global batch that belong to the replicas with the numbers `own`.

    In a graph there are two cases in which the sizes are tensors, and static sizes are unknown: a
    replica may have fewer than two rows, or the size is known only when the step runs.
    """
    total: Any = known_size(batch)
    # Eagerly every size is known. In a graph, no local batch may have the static size 0 or 1. Keras
    # treats a loss of the static shape (0,) differently from other losses. `is_known` says why the
    # size 1 is avoided.
    if total is None or not (is_known(total, replicas) or tf.executing_eagerly()):
        total = _size_in_step(batch)
    if len(own) == replicas:
        return OwnRows(batch, total, total)
    begin, end = _begins(total, replicas, (own.start, own.stop))
    [rows] = _cut(batch, [_with_stand_in(begin, end, total)], total)
    return OwnRows(rows, end - begin, total)


def compared_in(number: tf.Tensor, batch: object) -> Compared:
    """Returns the data of a batch that the workers compare with each other.

    A worker's pipeline sees the whole global batch, but a step gets only the worker's own rows. So
    the pipeline calls this function, and sends the `Compared` along with the rows. The step returns
    the `Compared` to Python code, which compares it with those of the other workers. `number` is
    the number of the batch in the iteration over the data.
    """

    def beginning(leaf: object) -> tf.Tensor:
        if not isinstance(leaf, tf.Tensor) or leaf.shape.rank == 0:
            return tf.constant(0)  # a leaf without rows has no first rows to compare
        return _lines(leaf[: tf.where(number == 0, ROWS, 0)])[:, :ELEMENTS]

    def checksum(leaf: object) -> tf.Tensor:
        if not isinstance(leaf, tf.Tensor):
            return tf.constant(0)
        lines = _lines(leaf) if leaf.shape.rank else tf.reshape(leaf, [1, 1])
        count, length = tf.unstack(tf.shape(lines, tf.int64))
        each = tf.maximum(BYTES // (tf.maximum(count, 1) * max(leaf.dtype.size, 1)), 1)
        some = tf.reshape(lines[:, number * each % tf.maximum(length, 1) :][:, :each], [1, -1])
        fingerprint = tf.raw_ops.Fingerprint(data=some, method="farmhash64")
        return tf.bitcast(fingerprint[0, :4], tf.int32)

    leaves = keras.tree.flatten(batch)[: len(names_of(batch))]
    return Compared(
        keras.tree.map_structure(beginning, batch), tf.stack([checksum(leaf) for leaf in leaves])
    )


def _lines(rows: tf.Tensor) -> tf.Tensor:
    count = tf.shape(rows)[0]
    return tf.reshape(rows, [count, tf.size(rows) // tf.maximum(count, 1)])


def compared_of(batch: object) -> Compared | None:
    """Returns the `Compared` of a batch; None if the workers do not compare batches."""
    batch = batch.parts[0] if isinstance(batch, PlacedBatch) else batch
    return (batch.compared or None) if isinstance(batch, OwnRows) else None


def first_rows(batch: object, count: int) -> Any:
    """Returns the first rows of a batch."""
    return _cut(batch, [(0, count)], count)[0]


def split(batch: OwnRows, replicas: int, *, stand_ins: bool) -> list[OwnRows]:
    """Divides rows among the replicas of this process; replicas with more rows come first."""
    size = batch.size
    held = size if isinstance(size, int) and size else _size_in_step(batch.rows)
    bounds = list(itertools.pairwise(_begins(size, replicas, range(replicas + 1))))
    sizes = [end - begin for begin, end in bounds]
    if stand_ins:
        bounds = [_with_stand_in(*one, held) for one in bounds]
    rows = keras.tree.map_structure(none_for_optional, batch.rows)
    return [
        batch._replace(rows=own, size=count)
        for own, count in zip(_cut(rows, bounds, held), sizes, strict=True)
    ]


def rows_on_devices(batch: PlacedBatch, replicas: int, own: range) -> list[OwnRows]:
    """Returns the parts of a `PlacedBatch`; sizes that are known become Python integers."""
    total = int(batch.parts[0].total) if tf.executing_eagerly() else batch.total
    if not is_known(total, replicas):
        return list(batch.parts)
    known = []
    for replica, part in zip(own, batch.parts, strict=True):
        begin, end = bounds_of_replica(total, replicas, replica)
        rows = keras.tree.map_structure(partial(_of_known_size, rows=end - begin), part.rows)
        known.append(OwnRows(rows, end - begin, total))
    return known


def on_host(batch: Any) -> Any:
    """Returns a `PlacedBatch` with its parts joined on the host; any other batch unchanged.

    Only eager code may call this function.
    """
    if not isinstance(batch, PlacedBatch):
        return batch
    sizes = [int(part.size) for part in batch.parts]
    counted = [part.rows for part, size in zip(batch.parts, sizes, strict=True) if size]

    def whole(*leaves: Any) -> Any:
        is_one = leaves[0] is None or leaves[0].shape.rank == 0
        return leaves[0] if is_one else tf.concat(leaves, 0)

    with tf.device(HOST):
        rows = keras.tree.map_structure(whole, *(counted or [batch.parts[0].rows]))
        first = batch.parts[0]
        return OwnRows(rows, sum(sizes), int(first.total), first.compared)


def counted_rows(value: Any, size: Any) -> Any:
    """Returns a replica's rows without a stand-in row; `size` is how many rows the replica has."""
    if isinstance(size, int) and size:
        return value
    if isinstance(value, tf.SparseTensor):
        return _sparse_rows(value, 0, tf.where(size > 0, value.dense_shape[0], 0))
    return value[: tf.where(size > 0, _row_count(value), 0)]


def none_for_optional(leaf: object) -> Any:
    """Returns None for an empty ``tf.experimental.Optional``, by which datasets represent None."""
    return None if isinstance(leaf, tf.experimental.Optional) else leaf


@contextmanager
def division_errors() -> Iterator[None]:
    """Translates TensorFlow's error for a batch that cannot be divided.

    Other errors about shapes get a note, which says that a replica has only a part of the batch.
    """
    try:
        yield
    except tf.errors.InvalidArgumentError as error:
        if not _FAILED_DIVISION.search(error.message):
            LocalBatch(None, None, None).note_in(error)
            raise
        # The new message quotes TensorFlow's message, because Keras raises the new error again
        # ``from None``, which hides TensorFlow's error.
        raise InputError(
            "Expected tensors with the same number of examples in a batch. Received: another "
            "number than in the first tensor. Let the data source yield as many targets and "
            f"weights as inputs. TensorFlow's message: {error.message}"
        ) from error


def is_known(total: object, replicas: int) -> bool:
    """Returns whether the number of rows of each replica may be static while code is traced.

    In a graph each replica must have at least two rows: with one row, `Lookups` cannot tell whether
    indices are repeated for each row.
    """
    least = 1 if tf.executing_eagerly() else 2
    return isinstance(total, int) and total >= least * replicas


def _begins(total: Any, replicas: int, of: Iterable[int]) -> list[Any]:
    """Returns where the local batches of the given replicas begin in the global batch.

    `kerasdist/input/sharding.py` divides batches in the same way.
    """
    each, rest = total // replicas, total % replicas
    least = min if isinstance(total, int) else tf.minimum
    return [replica * each + least(replica, rest) for replica in of]


def _with_stand_in(begin: Any, end: Any, held: Any) -> tuple[Any, Any]:
    """Returns a local batch's bounds; an empty batch gets the last row as its stand-in."""
    least, most = (min, max) if isinstance(held, int) else (tf.minimum, tf.maximum)
    begin = least(begin, most(held - 1, 0))
    return begin, most(end, begin + 1)


def _cut(batch: Any, bounds: Sequence[tuple[Any, Any]], held: Any) -> list[Any]:
    """Slices a batch at the bounds; each slice also gets all leaves without rows."""

    def parts(leaf: Any) -> list[Any]:
        if none_for_optional(leaf) is None or leaf.shape.rank == 0:
            return [leaf] * len(bounds)
        if isinstance(leaf, tf.Tensor) and not isinstance(held, int):
            # This split makes the step fail if a leaf has another number of rows than `held`. It
            # makes a second, empty part, because TensorFlow would remove a split into one part.
            # The split makes no copy.
            leaf, _ = tf.split(leaf, tf.stack([held, 0]), num=2, name=_DIVISION)
        if isinstance(leaf, tf.SparseTensor):
            return [_sparse_rows(leaf, *one) for one in bounds]
        return [leaf[begin:end] for begin, end in bounds]

    columns = [parts(leaf) for leaf in keras.tree.flatten(batch)]
    return [keras.tree.pack_sequence_as(batch, row) for row in zip(*columns, strict=True)]


def _of_known_size(leaf: Any, rows: int) -> Any:
    if leaf is not None and leaf.shape.rank not in (None, 0):
        leaf.set_shape([rows, *leaf.shape[1:]])
    return leaf


def _sparse_rows(tensor: tf.SparseTensor, begin: Any, end: Any) -> tf.SparseTensor:
    width = tf.shape(tensor, out_type=tf.int64)[1:]
    start = tf.concat([[tf.cast(begin, tf.int64)], tf.zeros_like(width)], 0)
    size = tf.concat([[tf.cast(end - begin, tf.int64)], width], 0)
    rows = tf.sparse.slice(tensor, start, size)
    rows.set_shape([None, *tensor.shape[1:]])
    return rows


def _batched(batch: object) -> list[Any]:
    """Returns the tensors of a batch that have rows."""
    leaves = [none_for_optional(leaf) for leaf in keras.tree.flatten(batch)]
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


def known_size(spec: object) -> int | None:
    """Returns the static number of rows of a batch or of its spec; None if it is unknown."""
    static = _static_sizes(_batched(spec))
    return static.pop() if len(static) == 1 else None


def _size_in_step(batch: object) -> tf.Tensor:
    """Returns the number of rows as a tensor whose value TensorFlow cannot infer while tracing."""
    return tf.raw_ops.PlaceholderWithDefault(input=_row_count(_batched(batch)[0]), shape=[])


def _row_count(leaf: Any) -> tf.Tensor:
    if isinstance(leaf, tf.RaggedTensor):
        return leaf.nrows(out_type=tf.int32)
    return tf.shape(leaf, out_type=tf.int32)[0]
