"""Puts each replica's rows on its device before the step that uses them.

Each device has a pipeline. One pipeline on the host gives local batches to the devices' pipelines
in turn, by TensorFlow's ``MultiDeviceIterator``, which ``tf.distribute`` uses too. A dataset of
``tf.distribute`` traces six functions for each device in each epoch. A dataset of this module
traces these functions once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import tensorflow as tf

from kerasdist.backends.tensorflow import internals
from kerasdist.backends.tensorflow.fit.batches import HOST, PlacedBatch

# For each argument of ``tf.raw_ops.GeneratorDataset`` that takes a function: the attribute of
# TensorFlow's private class ``_PerDeviceGenerator`` that holds this function.
_FUNCTIONS = {
    "init_func": internals.GENERATOR_BEGIN,
    "next_func": internals.GENERATOR_NEXT,
    "finalize_func": internals.GENERATOR_END,
}

# How many local batches wait on each device, besides the one that a step uses.
_AHEAD = 1


def untuned(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns a dataset without autotuning, for a pipeline that has nothing to tune.

    TensorFlow runs a thread for autotuning, which sometimes misses the request to stop. Then the
    end of an epoch takes up to as long as the epoch itself (seen with TensorFlow 2.21).
    """
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)


def can_prefetch(spec: object) -> bool:
    """Returns whether batches of these types and shapes can wait on devices.

    TensorFlow keeps strings on the host. Sparse and ragged tensors stay on the host as well. All
    batches stay on the host if TensorFlow lacks the private generator that this module uses.
    """
    generator = internals.DEVICE_GENERATOR, *_FUNCTIONS.values()
    if not all(one.is_there() for one in generator):
        return False
    leaves = tf.nest.flatten(spec)
    return all(
        isinstance(leaf, tf.TensorSpec)
        and (leaf.dtype.is_numpy_compatible and leaf.dtype != tf.string)
        for leaf in leaves
    )


def in_a_row(elements: Sequence[Any], spec: object = None) -> tf.data.Dataset:
    """Returns a dataset that yields the elements; a given `spec` becomes its ``element_spec``."""

    def of_one(element: object) -> tf.data.Dataset:
        dataset = tf.data.Dataset.from_tensors(element)
        if spec is None:
            return dataset
        variant = tf.data.experimental.to_variant(dataset)
        return tf.data.experimental.from_variant(variant, structure=spec)

    return functools.reduce(tf.data.Dataset.concatenate, map(of_one, elements))


def in_local_batches(
    dataset: tf.data.Dataset, cut: Callable[[Any], Sequence[Any]]
) -> tf.data.Dataset:
    """Returns a dataset of the parts into which `cut` divides each batch."""
    # tf.data passes the members of a tuple as arguments, and any other element as one argument.
    is_tuple = type(dataset.element_spec) is tuple

    def parts_of_one(*batch: object) -> tf.data.Dataset:
        return in_a_row(cut(batch if is_tuple else batch[0]))

    return dataset.flat_map(parts_of_one)


class PlacedIterator(tf.experimental.ExtensionType):
    """Yields `PlacedBatch`es. A graph can take this iterator as an argument.

    Attributes:
        source: The object that feeds the devices' iterators, and must live as long as they do.
        iterators: The iterators of the devices.
        devices: The names of the devices.
        total: How many examples each global batch has; 0 if that is not known.
    """

    source: tf.Tensor
    iterators: tuple[tf.data.Iterator, ...]
    devices: tuple[str, ...]
    total: int

    def get_next(self) -> PlacedBatch:
        """Returns the next batch.

        If the pipeline fails, TensorFlow raises the error on the first device. On the other devices
        the data may just end. So the other devices wait for the first one. Otherwise a step could
        report the end of the data and not the error.
        """
        parts: list[Any] = []
        for device, iterator in zip(self.devices, self.iterators, strict=True):
            arrived = [parts[0].total] if parts else []
            with tf.control_dependencies(arrived), tf.device(device):
                parts.append(iterator.get_next())
        return PlacedBatch(tuple(parts), self.total)

    def get_next_as_optional(self) -> PlacedOptional:
        """Returns the next batch, or the end of the data."""
        parts: list[Any] = []
        for device, iterator in zip(self.devices, self.iterators, strict=True):
            with tf.device(device):
                parts.append(iterator.get_next_as_optional())
        return PlacedOptional(self, parts)

    def over(self, batches: Sequence[PlacedBatch]) -> PlacedIterator:
        """Returns an iterator of the same type over given batches."""
        parts = [part for batch in batches for part in batch.parts]
        own = in_a_row(parts, self.iterators[0].element_spec)
        return iter(PlacedBatches(own, self.devices, self.total))

    def __iter__(self) -> PlacedIterator:
        return self

    def __next__(self) -> PlacedBatch:
        try:
            return self.get_next()
        except tf.errors.OutOfRangeError:
            raise StopIteration from None


@dataclass(frozen=True)
class PlacedOptional:
    """A batch, or the end of the data, which comes at the same time on all devices."""

    iterator: PlacedIterator
    parts: Sequence[Any]

    def has_value(self) -> Any:
        """Returns whether there is a batch."""
        return self.parts[0].has_value()

    def get_value(self) -> PlacedBatch:
        """Returns the batch."""
        return PlacedBatch(tuple(one.get_value() for one in self.parts), self.iterator.total)


@final
class PlacedBatches:
    """A dataset of `PlacedBatch`es."""

    def __init__(self, parts: Any, devices: Sequence[str], total: int) -> None:
        """Stores `parts`, a dataset that yields the `OwnRows` for one device after another.

        `total` is the number of examples of each global batch; 0 if that is not known.
        """
        self._parts = parts
        self._devices = tuple(devices)
        self._total = total
        specs = tf.nest.flatten(parts.element_spec)
        self._types = {
            "output_types": [one.dtype for one in specs],
            "output_shapes": [one.shape for one in specs],
        }
        with tf.device(HOST):
            self._host = tf.constant(tf.constant(0).device)
            unused, number = self._source(), tf.constant(0, tf.int64)
        self._functions = self._on_each_device(
            lambda index: internals.DEVICE_GENERATOR.value(
                index, unused, number, self._host, parts.element_spec, iterator_is_anonymous=True
            )
        )

    def __iter__(self) -> PlacedIterator:
        with tf.device(HOST):
            # Each iterator has a source of its own. If a source were used again, random operations
            # would continue their sequence of numbers. In plain Keras each epoch begins the same
            # sequence again.
            source = self._source()
            begun = tf.raw_ops.MultiDeviceIteratorInit(
                dataset=tf.data.experimental.to_variant(self._parts),
                multi_device_iterator=source,
                max_buffer_size=_AHEAD,
            )
            handle = tf.raw_ops.MultiDeviceIteratorToStringHandle(multi_device_iterator=source)
        spec = self._parts.element_spec

        def iterator(index: int) -> tf.data.Iterator:
            functions = self._functions[index]
            variant = tf.raw_ops.GeneratorDataset(
                init_func_other_args=[self._host, handle],
                next_func_other_args=[self._host, begun, source],
                finalize_func_other_args=[self._host],
                **{name: function.of(functions) for name, function in _FUNCTIONS.items()},
                **self._types,
            )
            own = tf.data.experimental.from_variant(variant, spec)
            return iter(untuned(own.prefetch(_AHEAD)))

        iterators = tuple(self._on_each_device(iterator))
        return PlacedIterator(source, iterators, self._devices, self._total)

    def _source(self) -> tf.Tensor:
        return tf.raw_ops.AnonymousMultiDeviceIteratorV3(devices=list(self._devices), **self._types)

    def _on_each_device(self, function: Callable[[int], Any]) -> list[Any]:
        results = []
        for index, device in enumerate(self._devices):
            with tf.device(device):
                results.append(function(index))
        return results
