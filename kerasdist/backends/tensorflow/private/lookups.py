"""Finds which rows of the replicas' sparse gradients one device would have only once.

The gradient of a lookup in a table is a ``tf.IndexedSlices``, which has one row of values for each
index that was looked up. Keras's optimizers square and clip each of these rows by itself. So the
update depends on whether rows with the same index are added to one row or stay separate.

Indices from the batch, such as tokens, are looked up for each example. One device would have the
gradient's rows of all replicas, one after another. Indices that do not depend on the batch, such as
the positions ``ops.arange(n)``, are the same in all replicas. One device would look up such an
index only once, so the rows that the replicas have for the index are added to one row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import tensorflow as tf

from kerasdist.backends.tensorflow.internals import ADD_OP_CALLBACK, REMOVE_OP_CALLBACK
from kerasdist.backends.tensorflow.private.strategies import components, mirrored

# Parts of the names of operations that return different values on each replica.
_DIFFERENT = ("Random", "Stateless", "Sampler", "Multinomial", "TruncatedNormal", "PyFunc", "Iter")
# Stands for an eager operation that makes integers from floats. Such integers count as tokens of
# the batch, because positions are rarely made from floats.
_OF_FLOATS = "Floats"


@dataclass(frozen=True)
class Terms:
    """The terms that the replicas add up for the gradient of one variable.

    Attributes:
        added: This replica's terms.
        indices: For each term, its indices if they do not depend on the batch, so that one device
            has each of them once; otherwise None.
        dense_shape: The shape of the variable to which the indices belong; None if the only term is
            the gradient itself.
        is_merged: Whether rows with the same index are summed to one row, as on one device.
    """

    added: Sequence[Any]
    indices: Sequence[Any] = (None,)
    dense_shape: Any = None
    is_merged: bool = False

    def gradient(self, sums: Sequence[Any]) -> Any:
        """Puts a gradient together from `sums`: for each term, its sum over the replicas.

        If the sums have a component for each device, so has the gradient.
        """
        if self.dense_shape is None:
            return merged(sums[0]) if self.is_merged else sums[0]
        held = list(map(components, sums))
        parts = [
            self._slices([one[index % len(one)] for one in held])
            for index in range(max(map(len, held)))
        ]
        return parts[0] if len(parts) == 1 else mirrored(parts)

    def _slices(self, sums: Sequence[Any]) -> tf.IndexedSlices:
        slices = [
            one if rows is None else _once(one, rows)
            for one, rows in zip(sums, self.indices, strict=True)
        ]
        return tf.IndexedSlices(
            tf.concat([one.values for one in slices], 0),
            tf.concat([tf.cast(one.indices, tf.int64) for one in slices], 0),
            self.dense_shape,
        )


@final
class Lookups:
    """Finds the tensors from which a replica's code makes indices, in a graph or eagerly."""

    def __init__(self, batch: Any, total: Any, replicas: int) -> None:
        """Stores the replica's rows of the batch, and the number of rows of all replicas."""
        leaves = tf.nest.flatten(batch, expand_composites=True)
        self._batch = {id(leaf): leaf for leaf in leaves if tf.is_tensor(leaf)}
        # The possible numbers of a replica's rows. Empty if they are unknown, or if a replica may
        # have a single row: indices that are "repeated" for one row look like any other indices.
        known = int(tf.get_static_value(total) or 0)
        sizes = {known // replicas, -(-known // replicas)}
        self._sizes = sizes if min(sizes) > 1 else set()
        # For the id of each eager tensor of integers: the tensor, the name of the operation that
        # made it, and the inputs of that operation.
        self._made: dict[int, tuple[Any, str, Sequence[Any]]] = {}

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """In eager code, records which operations make indices.

        In a graph nothing is recorded, because the graph itself contains the operations.
        """
        if not (tf.executing_eagerly() and _can_record()):
            yield
            return
        ADD_OP_CALLBACK.value(self._record)
        try:
            yield
        finally:
            REMOVE_OP_CALLBACK.value(self._record)

    def terms(self, gradient: Any) -> Terms:
        """Divides a gradient into terms whose sums over the replicas give one device's gradient."""
        if not isinstance(gradient, tf.IndexedSlices):
            return Terms((gradient,))
        if tf.executing_eagerly() and not _can_record():
            ADD_OP_CALLBACK.require()
            REMOVE_OP_CALLBACK.require()
        lookups = self._lookups(gradient.indices)
        # For each lookup, whether one device would repeat it for each row of the global batch.
        of_rows = [self._comes_from_batch(one) or self._is_repeated(one) for one in lookups]
        if all(of_rows):
            # In a graph, `slices_of_all` in fit/gradients.py decides later whether rows of the same
            # index are summed.
            is_merged = tf.executing_eagerly() and are_unique(gradient.indices, self._made_by)
            return Terms((gradient,), is_merged=is_merged)
        sizes = [one.shape.num_elements() or tf.size(one) for one in lookups]
        values = [gradient.values] if len(sizes) == 1 else tf.split(gradient.values, sizes)
        # Eager indices may come from NumPy and differ between replicas. So each eager term keeps
        # its indices.
        added = [
            tf.IndexedSlices(value, rows, gradient.dense_shape)
            if own or tf.executing_eagerly()
            else value
            for own, value, rows in zip(of_rows, values, lookups, strict=True)
        ]
        indices = [None if own else rows for own, rows in zip(of_rows, lookups, strict=True)]
        return Terms(added, indices, gradient.dense_shape)

    def _lookups(self, indices: Any) -> list[Any]:
        """Returns the indices of each lookup in a table.

        If code looks up several times in the same table, TensorFlow concatenates the indices of all
        lookups for the gradient. This method divides them again.
        """
        kind, inputs = self._made_by(indices)
        if kind != "ConcatV2":
            return [indices]
        return [one for part in inputs[:-1] for one in self._lookups(part)]

    def _comes_from_batch(self, tensor: Any) -> bool:
        """Returns whether a tensor depends on the batch, on its size, or on a random draw."""
        waiting, seen = [tensor], set()
        while waiting:
            one = waiting.pop()
            if id(one) in self._batch:
                return True
            if id(one) in seen:
                continue
            seen.add(id(one))
            kind, inputs = self._made_by(one)
            if kind == _OF_FLOATS or any(part in kind for part in _DIFFERENT):
                return True
            if kind == "StridedSlice" and self._is_other_size(inputs):
                continue
            waiting += inputs
        return False

    def _is_other_size(self, inputs: Sequence[Any]) -> bool:
        """Returns whether a slice with these inputs selects the size of an axis other than 0."""
        kind, _ = self._made_by(inputs[0])
        begin, end = (tf.get_static_value(one) for one in inputs[1:3])
        if kind != "Shape" or begin is None or end is None:
            return False
        return begin.size == 1 and begin[0] != 0 and end[0] in (0, begin[0] + 1)

    def _is_repeated(self, indices: Any) -> bool:
        """Returns whether indices are repeated for each row of a batch whose size is known.

        User code gets a known size as a Python number. So the operations of the graph do not show
        that the indices depend on the size of the batch.
        """
        count = indices.shape.num_elements()
        sizes = [size for size in self._sizes if count and count % size == 0]
        value = constant(self._given(indices)) if sizes else None
        if value is None:
            return False
        blocks = (value.reshape(size, -1) for size in sizes)
        return any((block == block[0]).all() for block in blocks)

    def _given(self, indices: Any) -> Any:
        """Returns the indices that user code gave, before `keras.ops.take` changed them."""
        kind, inputs = self._made_by(indices)
        if kind in ("Cast", "Identity", "Reshape"):
            return self._given(inputs[0])
        return self._given(inputs[2]) if kind == "SelectV2" else indices

    def _made_by(self, tensor: Any) -> tuple[str, Sequence[Any]]:
        """Returns the name and the inputs of the operation that made a tensor."""
        return self._made[id(tensor)][1:] if id(tensor) in self._made else made_in_graph(tensor)

    def _record(
        self,
        kind: Any,
        inputs: Sequence[Any],
        _attributes: object,
        outputs: Sequence[Any],
        op_name: str | None = None,
        graph: tf.Graph | None = None,
    ) -> None:
        if graph is not None:  # a function is being traced, and its graph records the operation
            return
        name = kind.decode() if isinstance(kind, bytes) else kind
        if name in ("Shape", "ReadVariableOp"):
            inputs = ()
        elif any(one.dtype.is_floating for one in inputs):
            name, inputs = _OF_FLOATS, ()  # without the inputs, so that these can be freed
        for one in outputs:
            if one.dtype.is_integer or one.dtype == tf.bool:
                self._made[id(one)] = one, name, inputs


def made_in_graph(tensor: Any) -> tuple[str, Sequence[Any]]:
    """Returns the name and the inputs of the operation in a graph that makes a tensor."""
    if not tf.is_symbolic_tensor(tensor):
        return "Const", ()
    inputs = list(tensor.op.inputs)
    kind = tensor.op.type
    return kind, [inputs[tensor.value_index]] if kind == "IdentityN" else inputs


def are_unique(
    indices: Any, made_by: Callable[[Any], tuple[str, Sequence[Any]]] = made_in_graph
) -> bool:
    """Returns whether a `Unique` operation made the indices, as in gradients of sparse products."""
    kind, inputs = made_by(indices)
    while kind in ("Cast", "Identity", "Reshape"):
        kind, inputs = made_by(inputs[0])
    return kind in ("Unique", "UniqueV2")


def merged(slices: tf.IndexedSlices) -> tf.IndexedSlices:
    """Returns slices with one row per index: the sum of all rows that belong to this index."""
    indices, places = tf.unique(slices.indices)
    values = tf.math.unsorted_segment_sum(slices.values, places, tf.size(indices))
    return tf.IndexedSlices(values, indices, slices.dense_shape)


def _can_record() -> bool:
    """Returns whether eagerly executed operations can be recorded."""
    return ADD_OP_CALLBACK.is_there() and REMOVE_OP_CALLBACK.is_there()


def _once(total: Any, indices: Any) -> tf.IndexedSlices:
    """Returns the gradient of one lookup as one device has it, with one row per looked-up index.

    `total` is the sum of this gradient over the replicas: a tensor with one row per index, or, in
    eager code, the slices of all replicas, one after another. If the replicas have looked up
    different indices, which eager code can do, `total` is returned unchanged.
    """
    if not isinstance(total, tf.IndexedSlices):
        return tf.IndexedSlices(total, indices)
    if total.indices.shape[0] % max(indices.shape.num_elements(), 1):
        return total
    blocks = tf.reshape(total.indices, (-1, *indices.shape))
    if not tf.reduce_all(blocks == blocks[0]):
        return total
    values = tf.reshape(total.values, (*blocks.shape, *total.values.shape[1:]))
    return tf.IndexedSlices(tf.reduce_sum(values, 0), blocks[0])


def constant(indices: Any) -> np.ndarray | None:
    """Returns the value of indices that are made only from constants; otherwise None."""
    if not tf.is_symbolic_tensor(indices):
        return indices.numpy()
    nodes: dict[str, Any] = {}
    waiting = [indices.op]
    while waiting:
        op = waiting.pop()
        if op.type in ("Placeholder", "PlaceholderWithDefault"):
            return None
        if op.name not in nodes:
            node = nodes[op.name] = op.node_def
            # The value does not depend on control inputs, such as the arrival of the batch, nor on
            # the colocation with other operations. So both are removed.
            node.attr.pop("_class", None)
            inputs = [one for one in node.input if not one.startswith("^")]
            del node.input[:]
            node.input.extend(inputs)
            waiting += [one.op for one in op.inputs]
    graph = tf.compat.v1.GraphDef(node=nodes.values(), versions=indices.graph.graph_def_versions)

    def value() -> Any:
        return tf.graph_util.import_graph_def(graph, return_elements=[indices.name])[0]

    with tf.init_scope():
        # A concrete function stays a graph even under `tf.config.run_functions_eagerly`.
        return tf.function(value, autograph=False).get_concrete_function()().numpy()
