"""Calls a model for some rows of a replica at a time, so that gradients need less memory.

A loop makes one pass after another and keeps only their outputs. In the backward pass another loop
repeats each pass and adds up the gradients. The code that calls the model gets the outputs of all
rows, so losses, metrics and updates are the same as after one call.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, final

import keras
import tensorflow as tf

from kerasdist import keras_compat
from kerasdist.backends.tensorflow.private.lookups import Lookups, Terms, constant
from kerasdist.core.structures import Arguments, flatten, pack
from kerasdist.training import passes


def calls(
    trainer: Any, call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Calls the model of a trainer, in as many passes as the limit of rows in a pass requires."""
    model = trainer.model
    most = passes.most_rows(trainer)
    is_pass = isinstance(keras_compat.get_stateless_scope(), _PassScope)
    if most is None or is_pass or kwargs.get("training") is False:
        return call(*args, **kwargs)
    given = Arguments.of(args, kwargs)
    first = next((leaf for leaf in flatten(given) if tf.is_tensor(leaf)), None)
    count = 0 if first is None else first.shape[0]
    if first is None or (count is not None and count <= most):
        return call(*args, **kwargs)
    trainer.require_passes()
    trainer.ensure_built(args[0])
    divided, examples = _Rows(given, partial(_has_rows, count=count)), tf.shape(first)[0]
    _require_rows(divided.tensors, examples, "inputs")
    one = _Pass(model, call, divided)
    outputs = _Passes(one, divided, examples, most).outputs(*divided.tensors, *one.weights)
    return one.form.packed(outputs)


@final
class _PassScope(keras.StatelessScope):
    """The scope in which a pass calls the model, and by which such a call is recognized."""


class _Rows:
    """The tensors of a structure that have one row per example, and the masks of these tensors.

    Attributes:
        tensors: The tensors, followed by their masks.
    """

    def __init__(self, structure: Any, has_rows: Callable[[Any], bool]) -> None:
        self._structure, self._leaves = structure, flatten(structure)
        self._places = [place for place, leaf in enumerate(self._leaves) if has_rows(leaf)]
        masks = {place: keras_compat.get_keras_mask(self._leaves[place]) for place in self._places}
        known = {place: mask for place, mask in masks.items() if mask is not None}
        self._masked = list(known)
        self.tensors = [*(self._leaves[place] for place in self._places), *known.values()]

    def packed(self, tensors: Iterable[Any]) -> Any:
        """Returns the structure with other tensors, which have the masks that follow them."""
        leaves, given = list(self._leaves), iter(tensors)
        for place in self._places:
            leaves[place] = next(given)
        for place in self._masked:
            keras_compat.set_keras_mask(leaves[place], next(given))
        return pack(self._structure, leaves)


class _Pass:
    """The call of a model as a function of only rows and weights.

    Attributes:
        weights: The values of the trainable variables.
        form: What the model returned, as symbolic tensors.
        outputs: A function of rows and weights, which returns the outputs for the rows and their
            masks.
    """

    form: _Rows

    def __init__(self, model: Any, call: Callable[..., Any], divided: _Rows) -> None:
        self._model, self._call, self._divided = model, call, divided
        self._terms: list[Terms | None] = []
        self.weights = _values(model.trainable_variables)
        self._state = _values(model.non_trainable_variables)
        rows = [tf.TensorSpec([None, *one.shape[1:]], one.dtype) for one in divided.tensors]
        self._specs = rows, [tf.TensorSpec(one.shape, one.dtype) for one in self.weights]
        self.outputs: Any = _trace(self._outputs, *self._specs)

    def gradients(self) -> Any:
        """Returns a function of rows, weights, and gradients of the outputs that are floats.

        This function returns two lists for `assembled`: values to join over the passes, and values
        to add up.
        """
        outputs = _floats(self.outputs.structured_outputs)
        upstream = [tf.TensorSpec([None, *one.shape[1:]], one.dtype) for one in outputs]
        return _trace(self._gradients, *self._specs, upstream)

    def assembled(self, joined: Sequence[Any], added: Sequence[Any]) -> list[Any]:
        """Returns, for all passes, the gradients of weights and of the rows that are floats."""
        joined, added = list(joined), list(added)
        inputs = len(_floats(self._divided.tensors))
        found, joined = joined[:inputs], joined[inputs:]
        for weight, terms in zip(self.weights, self._terms, strict=True):
            if terms is None:
                found.append(None)
                continue
            sums = []
            for term in terms.added:
                if isinstance(term, tf.IndexedSlices):
                    values, indices, *joined = joined
                    sums.append(tf.IndexedSlices(values, indices, tf.shape(weight)))
                else:
                    sums.append(added.pop(0))
            found.append(terms.gradient(sums))
        return found

    def _outputs(self, rows: list[tf.Tensor], weights: list[tf.Tensor]) -> list[tf.Tensor]:
        model = self._model
        variables = model.trainable_variables + model.non_trainable_variables
        values = zip(variables, [*weights, *self._state], strict=True)
        with _PassScope(list(values), collect_losses=True) as scope:
            outputs = self._divided.packed(rows).call(self._call)
            after = map(scope.get_current_value, model.non_trainable_variables)
            changed = map(operator.is_not, self._state, after)
            passes.require_nothing_kept(model, changed, model.losses)
            if scope.state_mapping.keys() - set(map(id, variables)):
                raise passes.refused("a call that updates a metric")
        self.form = _Rows(outputs, lambda leaf: leaf is not None)
        for leaf in self.form.tensors:
            if not _has_rows(leaf, None):
                raise passes.refused(f"an output of shape {leaf.shape}")
        _require_rows(self.form.tensors, tf.shape(rows[0])[0], "outputs")
        return self.form.tensors

    def _gradients(
        self, rows: list[tf.Tensor], weights: list[tf.Tensor], upstream: list[tf.Tensor]
    ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        inputs = _floats(rows)
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch([inputs, weights])
            outputs = _floats(self._outputs(rows, weights))
        gradients: Any = tape.gradient(outputs, [inputs, weights], upstream)
        of_inputs, found = gradients
        joined = [
            tf.zeros_like(row) if one is None else one
            for row, one in zip(inputs, of_inputs, strict=True)
        ]
        lookups = Lookups(rows, 0, 1)
        added: list[tf.Tensor] = []
        self._terms = []
        for gradient, weight in zip(found, weights, strict=True):
            terms = None if gradient is None else _outside(lookups.terms(gradient), weight)
            self._terms.append(terms)
            for term, indices in (
                () if terms is None else zip(terms.added, terms.indices, strict=True)
            ):
                if isinstance(term, tf.IndexedSlices):
                    joined += [term.values, term.indices]
                else:
                    shape = weight.shape if indices is None else [len(indices), *weight.shape[1:]]
                    added.append(tf.ensure_shape(term, shape))
        return joined, added


class _Passes:
    """Passes that all have the same number of rows.

    If rows are missing in the last pass, the last row is repeated. The outputs of repeated rows are
    left out, so that their gradients are 0.
    """

    def __init__(self, one: _Pass, divided: _Rows, examples: tf.Tensor, most: int) -> None:
        self._pass, self._divided, self._count = one, len(divided.tensors), examples
        self._number = -(-self._count // most)
        self._size = -(-self._count // self._number)
        self.outputs = tf.custom_gradient(self._outputs)

    def _outputs(self, *given: tf.Tensor) -> tuple[list[tf.Tensor], Callable[..., list[Any]]]:
        rows, weights = list(given[: self._divided]), list(given[self._divided :])
        function = self._pass.outputs

        def make(number: tf.Tensor, arrays: list[tf.TensorArray]) -> tuple[Any, Any]:
            outputs = function(self._of_pass(rows, number), weights)
            return number + 1, _written(arrays, number, outputs)

        begun = 0, self._arrays(function.structured_outputs)
        _, arrays = tf.while_loop(self._has_more, make, begun, parallel_iterations=1)
        outputs = [_joined(array)[: self._count] for array in arrays]

        def gradients(*upstream: tf.Tensor) -> list[Any]:
            pairs = zip(outputs, upstream, strict=True)
            own = [one for output, one in pairs if output.dtype.is_floating]
            found = iter(self._gradients(rows, weights, own))
            return [next(found) if one.dtype.is_floating else None for one in given]

        return outputs, gradients

    def _gradients(
        self, rows: list[tf.Tensor], weights: list[tf.Tensor], upstream: list[tf.Tensor]
    ) -> list[Any]:
        function = self._pass.gradients()
        joined, added = function.structured_outputs
        missing = self._number * self._size - self._count
        upstream = [
            tf.concat([one, tf.zeros([missing, *tf.unstack(tf.shape(one)[1:])], one.dtype)], 0)
            for one in upstream
        ]

        def make(number: tf.Tensor, arrays: Any, sums: Any) -> tuple[Any, Any, Any]:
            begin = number * self._size
            own = [one[begin : begin + self._size] for one in upstream]
            joined, added = function(self._of_pass(rows, number), weights, own)
            sums = [total + one for total, one in zip(sums, added, strict=True)]
            return number + 1, _written(arrays, number, joined), sums

        begun = 0, self._arrays(joined), [tf.zeros(one.shape, one.dtype) for one in added]
        _, arrays, sums = tf.while_loop(self._has_more, make, begun, parallel_iterations=1)
        found = self._pass.assembled(list(map(_joined, arrays)), sums)
        inputs = len(_floats(rows))
        return [one[: self._count] for one in found[:inputs]] + found[inputs:]

    def _has_more(self, number: tf.Tensor, *_: object) -> tf.Tensor:
        return number < self._number

    def _of_pass(self, rows: Sequence[Any], number: tf.Tensor) -> list[tf.Tensor]:
        places = tf.minimum(number * self._size + tf.range(self._size), self._count - 1)
        return [tf.gather(one, places) for one in rows]

    def _arrays(self, like: Sequence[Any]) -> list[tf.TensorArray]:
        return [
            tf.TensorArray(one.dtype, self._number, element_shape=[None, *one.shape[1:]])
            for one in like
        ]


def _trace(function: Callable[..., Any], *specs: Any) -> Any:
    traced: Any = tf.function(function, autograph=False)
    return traced.get_concrete_function(*specs)


def _written(
    arrays: Sequence[tf.TensorArray], number: tf.Tensor, values: Sequence[Any]
) -> list[tf.TensorArray]:
    return [array.write(number, one) for array, one in zip(arrays, values, strict=True)]


def _joined(array: tf.TensorArray) -> tf.Tensor:
    """Returns the rows of all passes, concatenated."""
    parts = array.stack()
    return tf.reshape(parts, tf.concat([[-1], tf.shape(parts)[2:]], 0))


def _floats(tensors: Iterable[Any]) -> list[Any]:
    return [one for one in tensors if one.dtype.is_floating]


def _outside(terms: Terms, weight: tf.Tensor) -> Terms:
    """Returns the terms of a gradient, with indices that can be used outside of the pass."""
    if terms.dense_shape is None:
        return terms
    indices = [one if one is None else constant(one) for one in terms.indices]
    if any(one is None and of is not None for one, of in zip(indices, terms.indices, strict=True)):
        raise passes.refused(f"indices that depend on no example, in a table of {weight.shape}")
    return replace(terms, indices=indices, dense_shape=tuple(weight.shape))


def _values(variables: Sequence[keras.Variable]) -> list[tf.Tensor]:
    return [tf.convert_to_tensor(one.value) for one in variables]


def _require_rows(leaves: Sequence[tf.Tensor], count: tf.Tensor, what: str) -> None:
    """Adds a check to a step, for sizes that are not known while the step is traced."""
    for leaf in leaves:
        message = str(passes.refused(f"{what} of another number of rows, of shape {leaf.shape}"))
        tf.debugging.assert_equal(tf.shape(leaf)[0], count, message)


def _has_rows(leaf: Any, count: int | None) -> bool:
    return isinstance(leaf, tf.Tensor) and len(leaf.shape) > 0 and leaf.shape[0] == count
