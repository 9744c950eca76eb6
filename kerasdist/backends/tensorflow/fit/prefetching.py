"""Puts each replica's rows on its device before the step that takes them.

The operations are those of TensorFlow's ``MultiDeviceIterator``, which ``tf.distribute`` uses. That
traces six functions for each device in each epoch; here a dataset has four for all its epochs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, final

import tensorflow as tf

from kerasdist.backends.tensorflow.fit.batches import HOST, PlacedBatch

# How many local batches wait on each device, beside the one that a step works on.
_AHEAD = 1


def untuned(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns a dataset without autotuning, where there is nothing to tune.

    TensorFlow runs a thread for it, which sometimes misses the request to stop: the end of an epoch
    then takes up to as long as the epoch did (seen with 2.21).
    """
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)


def can_prefetch(spec: object) -> bool:
    """Returns whether batches of these types and shapes can wait on devices.

    TensorFlow keeps strings on the host. Sparse and ragged tensors are left there as well.
    """
    leaves = tf.nest.flatten(spec)
    return all(
        isinstance(leaf, tf.TensorSpec)
        and (leaf.dtype.is_numpy_compatible and leaf.dtype != tf.string)
        for leaf in leaves
    )


def prefetched(
    dataset: tf.data.Dataset,
    divide: object,
    devices: Sequence[str],
    total: int | None,
) -> Callable[[], Any]:
    """Returns a function that makes an iterator over `PlacedBatch`es.

    `divide`, a ``tf.function``, turns a batch into a dataset of one `OwnRows` for each device.
    `total` is the number of examples in each global batch, if it is known.
    """
    parts, graph = _in_parts(dataset, divide)
    spec = PlacedSpec(parts.element_spec, tuple(devices), total)
    between = _functions_between(parts.element_spec)

    def start() -> list[tf.data.Iterator]:
        assert graph is not None  # it lives as long as the dataset that calls it
        return _iterators(parts, devices, between)

    return lambda: PlacedIterator(spec, start)


def _in_parts(dataset: tf.data.Dataset, divide: Any) -> tuple[tf.data.Dataset, Any]:
    """Does the same as ``dataset.flat_map(divide)``, and traces `divide` once for each type."""
    graph = divide.get_concrete_function(dataset.element_spec)
    spec = graph.structured_outputs.element_spec
    variant = tf.raw_ops.FlatMapDataset(
        input_dataset=tf.data.experimental.to_variant(dataset),
        other_arguments=graph.captured_inputs,
        f=graph,
        **_form(spec),
    )
    return tf.data.experimental.from_variant(variant, spec), graph


def _form(spec: object) -> dict[str, Any]:
    leaves = tf.nest.flatten(spec)
    return {
        "output_types": tuple(leaf.dtype for leaf in leaves),
        "output_shapes": tuple(leaf.shape for leaf in leaves),
    }


@final
class PlacedIterator(tf.data.Iterator):
    """Yields `PlacedBatch`es."""

    def __init__(self, spec: PlacedSpec, start: Callable[[], list[Any]]) -> None:
        super().__init__()
        self._spec = spec
        self._start = start
        self._by_device: list[Any] | None = None

    @property
    def by_device(self) -> list[Any]:
        """The iterator of each device, started by the first use."""
        if self._by_device is None:
            with tf.init_scope():
                self._by_device = self._start()
        return self._by_device

    @property
    def element_spec(self) -> Any:
        """The types and shapes of one device's rows."""
        return self._spec.element_spec

    @property
    def _type_spec(self) -> PlacedSpec:
        return self._spec

    def get_next(self) -> PlacedBatch:
        """Returns the next batch.

        An error of the pipeline reaches the first device, and for the others the data may just end.
        They wait for the first one, or the error would be taken for the end now and then.
        """
        first: list[Any] = []

        def part(index: int) -> Any:
            with tf.control_dependencies(first):
                rows = self.by_device[index].get_next()
            first[:] = first or [rows.total]
            return rows

        return self._spec.batch(part)

    def get_next_as_optional(self) -> _Optional:
        """Returns the next batch, if there is one."""
        return _Optional(
            self._spec, self._spec.each(lambda index: self.by_device[index].get_next_as_optional())
        )

    def __iter__(self) -> PlacedIterator:
        return self

    def __next__(self) -> PlacedBatch:
        try:
            return self.get_next()
        except tf.errors.OutOfRangeError:
            raise StopIteration from None

    def over(self, batches: Sequence[PlacedBatch]) -> PlacedIterator:
        """Returns an iterator of the same type over given batches."""
        parts = in_a_row([part for batch in batches for part in batch.parts], self.element_spec)
        between = _functions_between(self.element_spec)
        return PlacedIterator(self._spec, lambda: _iterators(parts, self._spec.devices, between))


@final
class _Optional:
    """A batch, or the end of the data, which all devices have at once."""

    def __init__(self, spec: PlacedSpec, parts: Sequence[Any]) -> None:
        self._spec = spec
        self._parts = parts

    def has_value(self) -> Any:
        return self._parts[0].has_value()

    def get_value(self) -> PlacedBatch:
        return self._spec.batch(lambda index: self._parts[index].get_value())


@final
class PlacedSpec(tf.TypeSpec):
    """The type of a `PlacedIterator`, by which functions that take one are traced."""

    def __init__(self, element_spec: Any, devices: tuple[str, ...], total: int | None) -> None:
        self.element_spec = element_spec
        self.devices = devices
        self.total = total

    def each(self, function: Callable[[int], Any]) -> list[Any]:
        """Calls a function once on each device, with its index."""
        results = []
        for index, device in enumerate(self.devices):
            with tf.device(device):
                results.append(function(index))
        return results

    def batch(self, part: Callable[[int], Any]) -> PlacedBatch:
        """Makes a batch of the parts that the function returns."""
        return PlacedBatch(tuple(self.each(part)), self.total)

    @property
    def value_type(self) -> type[PlacedIterator]:
        """The type of the iterators that this specification describes."""
        return PlacedIterator

    def _serialize(self) -> tuple[Any, ...]:
        return self.element_spec, self.devices, self.total

    @property
    def _component_specs(self) -> list[Any]:
        return [tf.data.IteratorSpec(self.element_spec)] * len(self.devices)

    def _to_components(self, value: PlacedIterator) -> list[Any]:
        return value.by_device

    def _from_components(self, components: Any) -> PlacedIterator:
        return PlacedIterator(self, lambda: list(components))


def in_a_row(elements: Sequence[Any], spec: object = None) -> tf.data.Dataset:
    """Returns a dataset of the elements; `spec` may leave open sizes that theirs do not."""

    def of_one(element: object) -> tf.data.Dataset:
        dataset = tf.data.Dataset.from_tensors(element)
        if spec is None:
            return dataset
        variant = tf.data.experimental.to_variant(dataset)
        return tf.data.experimental.from_variant(variant, structure=spec)

    return functools.reduce(tf.data.Dataset.concatenate, map(of_one, elements))


def _iterators(
    parts: tf.data.Dataset, devices: Sequence[str], between: Sequence[Any]
) -> list[tf.data.Iterator]:
    """Starts an iterator on each device, fed in turn by one pipeline on the host.

    `between` is the result of `_functions_between`.
    """
    form = _form(parts.element_spec)
    with tf.device(HOST):
        source = tf.constant(tf.constant(0).device)
        resource = tf.raw_ops.AnonymousMultiDeviceIteratorV3(devices=list(devices), **form)
        incarnation = tf.raw_ops.MultiDeviceIteratorInit(
            dataset=tf.data.experimental.to_variant(parts),
            multi_device_iterator=resource,
            max_buffer_size=_AHEAD,
        )
        handle = tf.raw_ops.MultiDeviceIteratorToStringHandle(multi_device_iterator=resource)
    same, fetched = between
    iterators = []
    for shard, device in enumerate(devices):
        with tf.device(device):
            variant = tf.raw_ops.GeneratorDataset(
                init_func_other_args=[handle, source],
                # The resource lives as long as the iterators that are fed by it.
                next_func_other_args=[source, incarnation, tf.constant(shard, tf.int64), resource],
                finalize_func_other_args=[source],
                init_func=same,
                next_func=fetched,
                finalize_func=same,
                **form,
            )
            own = tf.data.experimental.from_variant(variant, parts.element_spec)
            iterators.append(iter(untuned(own.prefetch(_AHEAD))))
    return iterators


def _functions_between(spec: object) -> tuple[Any, Any]:
    """Returns how a device's pipeline begins and ends, and how it fetches from the host."""
    form = _form(spec)
    text, number = tf.TensorSpec([], tf.string), tf.TensorSpec([], tf.int64)
    kept = tf.TensorSpec([], tf.resource)

    def take_one(handle: tf.Tensor, incarnation: tf.Tensor, shard: tf.Tensor) -> Any:
        return tf.raw_ops.MultiDeviceIteratorGetNextFromShard(
            multi_device_iterator=tf.raw_ops.MultiDeviceIteratorFromStringHandle(
                string_handle=handle, **form
            ),
            shard_num=tf.cast(shard, tf.int32),  # which a device would not take
            incarnation_id=incarnation,
            **form,
        )

    same_there = _graph(lambda handle: handle, text)
    taken_there = _graph(take_one, text, number, number)

    def same(handle: tf.Tensor, source: tf.Tensor) -> Any:
        return _called(same_there, source, [handle], [tf.string])

    def fetched(
        handle: tf.Tensor,
        source: tf.Tensor,
        incarnation: tf.Tensor,
        shard: tf.Tensor,
        resource: tf.Tensor,
    ) -> Any:
        del resource  # TensorFlow warns of an argument that is named `_`
        return _called(taken_there, source, [handle, incarnation, shard], form["output_types"])

    # Without the attribute, int32 tensors would stay on the host.
    ints = {"experimental_ints_on_device": True}
    return _graph(same, text, text), _graph(fetched, text, text, number, number, kept, **ints)


def _called(graph: object, source: tf.Tensor, given: Sequence[Any], types: Sequence[Any]) -> Any:
    """Calls a function of the host from a device's pipeline."""
    return tf.raw_ops.RemoteCall(target=source, args=given, Tout=types, f=graph)


def _graph(function: Callable[..., Any], *signature: object, **attributes: object) -> Any:
    compiled = tf.function(
        function,
        input_signature=signature,
        autograph=False,
        experimental_attributes=attributes or None,
    )
    return compiled.get_concrete_function()
