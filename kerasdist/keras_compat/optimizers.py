"""Keras's optimizers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras
from keras.src import backend
from keras.src.optimizers.base_optimizer import BaseOptimizer

from kerasdist.keras_compat.models import is_builtin

LossScaleOptimizer = keras.optimizers.LossScaleOptimizer


# Their updates of an element depend on nothing but that element of the weight and its slots.
ELEMENTWISE = (
    keras.optimizers.SGD,
    keras.optimizers.Adam,
    keras.optimizers.AdamW,
    keras.optimizers.Adamax,
    keras.optimizers.Nadam,
    keras.optimizers.Adagrad,
    keras.optimizers.Adadelta,
    keras.optimizers.RMSprop,
    keras.optimizers.Lion,
    keras.optimizers.Ftrl,
)


def is_elementwise(optimizer: keras.Optimizer) -> bool:
    """Returns whether Keras's own code updates each element of a weight by itself."""
    return isinstance(optimizer, ELEMENTWISE) and is_builtin(type(optimizer))


def updating(optimizer: keras.Optimizer) -> Any:
    """Returns the optimizer that updates weights: the one that a LossScaleOptimizer wraps."""
    return optimizer.inner_optimizer if isinstance(optimizer, LossScaleOptimizer) else optimizer


def applies_directly(optimizer: keras.Optimizer) -> bool:
    """Returns whether ``optimizer.apply`` is the one whose gradients are combined, no override."""
    own = getattr(optimizer.apply, "__func__", None)
    return own in (BaseOptimizer.apply, LossScaleOptimizer.apply)


def optimized_variables(optimizer: keras.Optimizer) -> list[Any]:
    """Returns the variables that an optimizer was built for, in its order."""
    return list(optimizer._trainable_variables)


def apply_combined_gradients(optimizer: Any, gradients: list[Any], variables: Any) -> None:
    """Applies the gradients of all replicas by Keras's own ``optimizer.apply``.

    A user-defined `apply` has already run in each replica.
    """
    if isinstance(optimizer, LossScaleOptimizer):
        # On TensorFlow, its `apply` must be called in a replica.
        optimizer._common_apply(gradients, variables)
    else:
        keras.Optimizer.apply(optimizer, gradients, variables)


def apply_scaled_gradients(optimizer: Any, gradients: list[Any], variables: Any) -> None:
    """Does the same as ``LossScaleOptimizer.apply``, where JAX traces it.

    Keras's own method leaks traced values out of its branches for finite and for other gradients
    (seen with 3.15.1); its stateless form does not.
    """
    if not optimizer.built:
        with backend.name_scope(optimizer.name, caller=optimizer):
            optimizer.build(variables)
        optimizer.built = True
    every = optimized_variables(optimizer)
    of = dict(zip(map(id, variables or every), gradients, strict=True))
    new, own = optimizer.stateless_apply(
        [variable.value for variable in optimizer.variables],
        [of.get(id(variable)) for variable in every],
        [variable.value for variable in every],
    )
    for variable, value in zip([*every, *optimizer.variables], [*new, *own], strict=True):
        variable.assign(value)


def index_variables(optimizer: Any) -> None:
    """Lets a TensorFlow optimizer find its slots, after its model's variables were recreated.

    The optimizer looks them up by native variable.
    """
    optimizer._trainable_variables_indices = {
        optimizer._var_key(variable): index
        for index, variable in enumerate(optimizer._trainable_variables)
    }


def move_optimizer(optimizer: Any, strategy: Any) -> Any:
    """Lets a TensorFlow optimizer make and update its state in a strategy's scope.

    Returns the strategy in whose scope it did before.
    """
    before = optimizer._distribution_strategy
    optimizer._distribution_strategy = strategy
    return before


def copy_of_optimizer(optimizer: Any, strategy: object) -> Any:
    """Returns a copy of a TensorFlow optimizer that updates the same variables of a strategy."""
    copy = object.__new__(type(optimizer))
    vars(copy).update(vars(optimizer))
    vars(copy)["_distribution_strategy"] = strategy
    return copy


def referenced_variables(
    optimizer: keras.Optimizer, variables: Iterable[keras.Variable]
) -> list[Any]:
    """Returns for each variable of an optimizer the model's variable that it belongs to.

    Keras relates them by name alone: the variable's path, with underscores, and the slot's name.
    """
    by_prefix = {f"{one.path.replace('/', '_')}_": one for one in variables}

    def reference(variable: keras.Variable) -> Any:
        fits = [
            prefix
            for prefix, one in by_prefix.items()
            if prefix in variable.path and one.shape == variable.shape
        ]
        return by_prefix[max(fits, key=len)] if fits else variable

    return [reference(variable) for variable in optimizer.variables]
