"""The first call of a training function, which looks at its batch before the graph gets it."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any, final

import tensorflow as tf

from kerasdist import keras_seam
from kerasdist.backends.tensorflow.batches import OwnRows
from kerasdist.backends.tensorflow.steps import StepsOnIterator, as_tensors
from kerasdist.backends.trial import examples
from kerasdist.training import first_batch


@final
class FirstStepChecked:
    """``train_function`` until the first step is checked; then the model's is the function inside.

    Keras hands over an iterator, from which the graph of a step takes its batches. The batches of
    the first call are taken here, and handed on by an iterator of the same type, for which the same
    graph serves.
    """

    def __init__(self, model: Any, steps: StepsOnIterator) -> None:
        """Prepares the function.

        Args:
            model: A model with a `TensorFlowTrainer`.
            steps: Its training function.
        """
        self._model = model
        self._steps = steps
        self._has_begun = False

    def __call__(self, iterator: Any) -> Any:
        """Does the steps, as `StepsOnIterator` does.

        Args:
            iterator: Yields global batches.
        """
        if not self._has_begun and not keras_seam.is_complete(self._model):
            # A user-defined step builds the rest now: the second one is compared.
            self._has_begun = True
            return self._steps(iterator)
        if not first_batch.is_wanted(self._model):
            self._hand_over()
            return self._steps(iterator)
        batches = list(itertools.islice(_batches(iterator), self._steps.count))
        if not batches:
            return self._steps(iterator)  # which says so
        if first_batch.check(self._model, batches[0], _total(batches[0])):
            self._hand_over()
        if isinstance(iterator, tf.data.Iterator):
            return self._steps(_again(batches, iterator.element_spec))
        return self._steps(iter(batches))

    def _hand_over(self) -> None:
        if self._model.train_function is self:
            self._model.train_function = self._steps


def _total(batch: Any) -> int:
    return int(batch.total) if isinstance(batch, OwnRows) else examples(batch)


def _batches(iterator: Any) -> Iterator[Any]:
    if not isinstance(iterator, tf.data.Iterator):
        yield from map(as_tensors, iterator)
        return
    while True:
        batch = iterator.get_next_as_optional()
        if not batch.has_value():
            return
        yield batch.get_value()


def _again(batches: list[Any], spec: Any) -> Any:
    """An iterator over batches, with the type of the one that they were taken from."""

    def dataset(batch: Any) -> tf.data.Dataset:
        # The shapes of a tensor are known, those of the dataset's elements may not be.
        variant = tf.data.experimental.to_variant(tf.data.Dataset.from_tensors(batch))
        return tf.data.experimental.from_variant(variant, structure=spec)

    return iter(functools.reduce(tf.data.Dataset.concatenate, map(dataset, batches)))
