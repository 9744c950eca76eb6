"""Calls a model for some rows of a replica at a time, so that gradients need less memory.

Each call for some rows is a pass. A loop makes the passes one after another, and keeps only their
outputs. When gradients are computed, another loop repeats each pass and adds up the gradients. The
code that calls the model gets the outputs of all rows, so losses, metrics and updates are the same
as after one call.
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
    """Calls a trainer's model, in several passes if there are more rows than a pass may have."""
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
    return _Passes(model, call, divided, examples, most).run()


@final
class _PassScope(keras.StatelessScope):
    """The scope in which a pass calls the model. It tells `calls` not to divide the rows again."""


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
        """Returns the structure with other tensors in place of its own.

        `tensors` lists these tensors, and after them their masks.
        """
        leaves, given = list(self._leaves), iter(tensors)
        for place in self._places:
            leaves[place] = next(given)
        for place in self._masked:
            keras_compat.set_keras_mask(leaves[place], next(given))
        return pack(self._structure, leaves)


@final
class _Passes:
    """Makes one call of a model in several passes, all with the same number of rows.

    If the last pass has too few rows, the last row is repeated. The outputs of the repeated rows
    are left out, so that their gradients are 0.
    """

    # The model's outputs for one pass. `run` replaces their tensors by those for all rows.
    _form: _Rows
    # For each weight: the terms of its gradient, which are added up over the passes (`Terms` in
    # lookups.py); None for a weight without a gradient.
    _terms: Sequence[Terms | None] = ()

    def __init__(
        self, model: Any, call: Callable[..., Any], divided: _Rows, examples: tf.Tensor, most: int
    ) -> None:
        self._model, self._call, self._divided, self._count = model, call, divided, examples
        self._number = -(-examples // most)
        self._size = -(-examples // self._number)
        self._weights = _values(model.trainable_variables)
        self._state = _values(model.non_trainable_variables)
        weights = [tf.TensorSpec(one.shape, one.dtype) for one in self._weights]
        self._specs = _of_any_size(divided.tensors), weights
        self._pass = _trace(self._outputs_of_pass, *self._specs)

    def run(self) -> Any:
        """Makes the passes; returns what the model returns for all rows."""
        outputs: Any = tf.custom_gradient(self._outputs)
        return self._form.packed(outputs(*self._divided.tensors, *self._weights))

    def _outputs(self, *given: tf.Tensor) -> tuple[list[tf.Tensor], Callable[..., list[Any]]]:
        inputs = len(self._divided.tensors)
        rows, weights = list(given[:inputs]), list(given[inputs:])

        def make(number: tf.Tensor) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
            return self._pass(self._of_pass(rows, number), weights), []

        joined, _ = self._loop(make, self._pass.structured_outputs, [])
        outputs = [one[: self._count] for one in joined]

        def gradients(*upstream: tf.Tensor) -> list[Any]:
            pairs = zip(outputs, upstream, strict=True)
            own = [one for output, one in pairs if output.dtype.is_floating]
            found = iter(self._gradients(rows, weights, own))
            return [next(found) if one.dtype.is_floating else None for one in given]

        return outputs, gradients

    def _gradients(
        self, rows: list[tf.Tensor], weights: list[tf.Tensor], upstream: list[tf.Tensor]
    ) -> list[Any]:
        """Returns the gradients with respect to the inputs that are floats, and to the weights."""
        specs = _of_any_size(_floats(self._pass.structured_outputs))
        function = _trace(self._gradients_of_pass, *self._specs, specs)
        missing = self._number * self._size - self._count
        upstream = [
            tf.concat([one, tf.zeros([missing, *tf.unstack(tf.shape(one)[1:])], one.dtype)], 0)
            for one in upstream
        ]

        def make(number: tf.Tensor) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
            begin = number * self._size
            own = [one[begin : begin + self._size] for one in upstream]
            return function(self._of_pass(rows, number), weights, own)

        joined, added = self._loop(make, *function.structured_outputs)
        inputs = len(_floats(rows))
        found: list[Any] = [one[: self._count] for one in joined[:inputs]]
        joined = joined[inputs:]
        for weight, terms in zip(weights, self._terms, strict=True):
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

    def _loop(
        self,
        make: Callable[[tf.Tensor], tuple[Any, Any]],
        joined: Sequence[tf.Tensor],
        added: Sequence[tf.Tensor],
    ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """Calls `make` with the number of each pass, and combines the results of these calls.

        `make` returns two lists of tensors, with the types and shapes of `joined` and of `added`.
        The tensors of the first list are concatenated over the passes, and those of the second list
        are added up.
        """

        def body(number: tf.Tensor, arrays: Any, sums: Any) -> tuple[Any, Any, Any]:
            rows, terms = make(number)
            arrays = [array.write(number, one) for array, one in zip(arrays, rows, strict=True)]
            sums = [total + one for total, one in zip(sums, terms, strict=True)]
            return number + 1, arrays, sums

        arrays = [
            tf.TensorArray(one.dtype, self._number, element_shape=[None, *one.shape[1:]])
            for one in joined
        ]
        begun = 0, arrays, [tf.zeros(one.shape, one.dtype) for one in added]
        _, arrays, sums = tf.while_loop(
            lambda number, *_: number < self._number, body, begun, parallel_iterations=1
        )
        return list(map(_concatenated, arrays)), sums

    def _of_pass(self, rows: Sequence[Any], number: tf.Tensor) -> list[tf.Tensor]:
        places = tf.minimum(number * self._size + tf.range(self._size), self._count - 1)
        return [tf.gather(one, places) for one in rows]

    def _outputs_of_pass(self, rows: list[tf.Tensor], weights: list[tf.Tensor]) -> list[tf.Tensor]:
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
        self._form = _Rows(outputs, lambda leaf: leaf is not None)
        for leaf in self._form.tensors:
            if not _has_rows(leaf, None):
                raise passes.refused(f"an output of shape {leaf.shape}")
        _require_rows(self._form.tensors, tf.shape(rows[0])[0], "outputs")
        return self._form.tensors

    def _gradients_of_pass(
        self, rows: list[tf.Tensor], weights: list[tf.Tensor], upstream: list[tf.Tensor]
    ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """Returns two lists: tensors to concatenate over the passes, and tensors to add up."""
        inputs = _floats(rows)
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch([inputs, weights])
            outputs = _floats(self._outputs_of_pass(rows, weights))
        gradients: Any = tape.gradient(outputs, [inputs, weights], upstream)
        of_inputs, found = gradients
        joined = [
            tf.zeros_like(row) if one is None else one
            for row, one in zip(inputs, of_inputs, strict=True)
        ]
        lookups = Lookups(rows, 0, 1)
        added: list[tf.Tensor] = []
        terms_of_weights: list[Terms | None] = []
        for gradient, weight in zip(found, weights, strict=True):
            terms = None if gradient is None else _outside(lookups.terms(gradient), weight)
            terms_of_weights.append(terms)
            for term, indices in (
                () if terms is None else zip(terms.added, terms.indices, strict=True)
            ):
                if isinstance(term, tf.IndexedSlices):
                    joined += [term.values, term.indices]
                else:
                    shape = weight.shape if indices is None else [len(indices), *weight.shape[1:]]
                    added.append(tf.ensure_shape(term, shape))
        self._terms = terms_of_weights
        return joined, added


def _trace(function: Callable[..., Any], *specs: Any) -> Any:
    traced: Any = tf.function(function, autograph=False)
    return traced.get_concrete_function(*specs)


def _concatenated(array: tf.TensorArray) -> tf.Tensor:
    """Returns the rows of all passes, concatenated."""
    parts = array.stack()
    return tf.reshape(parts, tf.concat([[-1], tf.shape(parts)[2:]], 0))


def _of_any_size(tensors: Iterable[Any]) -> list[tf.TensorSpec]:
    """Returns the specs of tensors, each with an unknown number of rows."""
    return [tf.TensorSpec([None, *one.shape[1:]], one.dtype) for one in tensors]


def _floats(tensors: Iterable[Any]) -> list[Any]:
    return [one for one in tensors if one.dtype.is_floating]


def _outside(terms: Terms, weight: tf.Tensor) -> Terms:
    """Returns a gradient's terms with their indices as NumPy arrays, and no longer as tensors.

    Index tensors belong to the traced function of a pass, so code outside of that function cannot
    use them.
    """
    if terms.dense_shape is None:
        return terms
    indices = [one if one is None else constant(one) for one in terms.indices]
    if any(one is None and of is not None for one, of in zip(indices, terms.indices, strict=True)):
        raise passes.refused(f"indices that depend on no example, in a table of {weight.shape}")
    return replace(terms, indices=indices, dense_shape=tuple(weight.shape))


def _values(variables: Sequence[keras.Variable]) -> list[tf.Tensor]:
    return [tf.convert_to_tensor(one.value) for one in variables]


def _require_rows(leaves: Sequence[tf.Tensor], count: tf.Tensor, what: str) -> None:
    """Makes the traced step fail, when it runs, if a tensor does not have `count` rows."""
    for leaf in leaves:
        message = str(passes.refused(f"{what} of another number of rows, of shape {leaf.shape}"))
        tf.debugging.assert_equal(tf.shape(leaf)[0], count, message)


def _has_rows(leaf: Any, count: int | None) -> bool:
    return isinstance(leaf, tf.Tensor) and len(leaf.shape) > 0 and leaf.shape[0] == count
