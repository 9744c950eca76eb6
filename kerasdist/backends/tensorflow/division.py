"""Which part of a variable each replica has (`sharding="optimizer"`), and how a part is updated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import tensorflow as tf


@final
@dataclass(frozen=True)
class Division:
    """Equal parts of a variable along one axis, one for each replica of all workers.

    Attributes:
        shape: The shape of the whole.
        axis: The axis.
        replicas: How many replicas there are.
        first: The number of the first replica in this process.
    """

    shape: tuple[int, ...]
    axis: int
    replicas: int
    first: int

    @property
    def size(self) -> int:
        """The size of a part along the axis."""
        return self.shape[self.axis] // self.replicas

    @property
    def part_shape(self) -> tuple[int, ...]:
        """The shape of a part."""
        return (*self.shape[: self.axis], self.size, *self.shape[self.axis + 1 :])

    def begin(self, index: int) -> int:
        """Returns where the part of a replica of this process begins, along the axis."""
        return (self.first + index) * self.size

    def part(self, value: Any, index: int) -> Any:
        """Returns a replica's part of a tensor of the whole's shape; any other value as it is."""
        if isinstance(value, tf.IndexedSlices):
            known = tf.get_static_value(value.dense_shape)
            is_whole = known is None or tuple(known) == self.shape
            return self._rows(value, index) if is_whole else value
        if not isinstance(value, tf.Tensor) or tuple(value.shape) != self.shape:
            return value
        begin = self.begin(index)
        return value[(slice(None),) * self.axis + (slice(begin, begin + self.size),)]

    def _rows(self, slices: tf.IndexedSlices, index: int) -> tf.IndexedSlices:
        """Keeps separate rows of the same index separate: an optimizer may square each."""
        begin = self.begin(index)
        shape = tf.constant(self.part_shape, slices.indices.dtype)
        if self.axis:
            places = (slice(None),) * self.axis + (slice(begin, begin + self.size),)
            return tf.IndexedSlices(slices.values[places], slices.indices, shape)
        places = slices.indices - begin
        own = tf.where((places >= 0) & (places < self.size))[:, 0]
        return tf.IndexedSlices(tf.gather(slices.values, own), tf.gather(places, own), shape)


@final
class Part:
    """A replica's part of its own copy of a weight: what an optimizer reads and updates of it.

    It has of a ``tf.Variable`` what Keras's optimizers use.
    """

    def __init__(self, copy: tf.Variable, division: Division, index: int, unique_id: str) -> None:
        self.dtype = copy.dtype
        self.name = copy.name
        self.shape = tf.TensorShape(division.part_shape)
        self._copy = copy
        self._division = division
        self._index = index
        self._unique_id = unique_id  # by which an optimizer finds a weight's slots

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> tf.Tensor:
        return tf.convert_to_tensor(self._read(), dtype, name=name)

    def __mul__(self, other: Any) -> tf.Tensor:
        return self._read() * other

    def _read(self) -> Any:
        return self._division.part(self._copy.read_value(), self._index)

    def assign(self, value: Any) -> None:
        """Writes the part, and nothing else of the copy."""
        division = self._division
        begin = [0] * len(division.shape)
        begin[division.axis] = division.begin(self._index)
        end = [start + size for start, size in zip(begin, division.part_shape, strict=True)]
        tf.raw_ops.ResourceStridedSliceAssign(
            ref=self._copy.handle,
            begin=begin,
            end=end,
            strides=[1] * len(begin),
            value=tf.convert_to_tensor(value, self.dtype),
        )

    def assign_add(self, value: Any) -> None:
        """Adds to the part."""
        self.assign(self._read() + tf.convert_to_tensor(value, self.dtype))

    def assign_sub(self, value: Any) -> None:
        """Subtracts from the part."""
        self.assign(self._read() - tf.convert_to_tensor(value, self.dtype))

    def scatter_add(self, slices: tf.IndexedSlices) -> None:
        """Adds to rows of the part."""
        self.assign_add(slices)

    def scatter_sub(self, slices: tf.IndexedSlices) -> None:
        """Subtracts from rows of the part."""
        self.assign_sub(slices)
