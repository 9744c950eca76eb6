"""Private attributes and methods of Keras's optimizers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras

from kerasdist.keras_compat import internals
from kerasdist.keras_compat.models import is_builtin

LossScaleOptimizer = keras.optimizers.LossScaleOptimizer


# Optimizers that compute the new value of an element of a weight only from the same element of the
# weight, of its gradient, and of the optimizer's variables for the weight.
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
    """Returns whether an optimizer is Keras's own, and updates each element of a weight alone."""
    return isinstance(optimizer, ELEMENTWISE) and is_builtin(type(optimizer))


def updates_at_once(optimizer: keras.Optimizer) -> bool:
    """Returns whether Keras's PyTorch code for an optimizer updates many weights in one call."""
    known = internals.UPDATE_AT_ONCE
    return known.is_there() and isinstance(optimizer, known.place[0])


def updating(optimizer: keras.Optimizer) -> Any:
    """Returns the optimizer that updates the weights.

    For a LossScaleOptimizer this is its inner optimizer. Any other optimizer is returned itself.
    """
    return optimizer.inner_optimizer if isinstance(optimizer, LossScaleOptimizer) else optimizer


def applies_directly(optimizer: keras.Optimizer) -> bool:
    """Returns whether ``optimizer.apply`` is Keras's own, and not overridden by a user."""
    own = getattr(optimizer.apply, "__func__", None)
    return own in (keras.Optimizer.apply, LossScaleOptimizer.apply)


def optimized_variables(optimizer: keras.Optimizer) -> list[Any]:
    """Returns the variables for which an optimizer was built, in the optimizer's order."""
    return list(internals.OPTIMIZED_VARIABLES.of(optimizer))


def slots_of(model: Any) -> list[keras.Variable]:
    """Returns the variables of a model's optimizer, which is built first if necessary."""
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None:  # a user's `train_step` may use other optimizers
        return []
    if not optimizer.built:
        optimizer.build(model.trainable_variables)
    return optimizer.variables


def apply_combined_gradients(optimizer: Any, gradients: list[Any], variables: Any) -> None:
    """Applies the gradients of all replicas by Keras's own ``optimizer.apply``.

    An `apply` that a user defines is not called here, because it has already run in each replica.
    """
    if isinstance(optimizer, LossScaleOptimizer):
        # On TensorFlow, `LossScaleOptimizer.apply` works only in a replica. So this line calls the
        # private method `_common_apply`, which does the work of `apply`.
        internals.APPLY_SCALED.of(optimizer)(gradients, variables)
    else:
        keras.Optimizer.apply(optimizer, gradients, variables)


def apply_scaled_gradients(optimizer: Any, gradients: list[Any], variables: Any) -> None:
    """Does the same as ``LossScaleOptimizer.apply``, in code that JAX can trace.

    Keras's own method has one branch for finite gradients and one for others, and leaks traced
    values from these branches (seen with 3.15.1). `stateless_apply` does not leak them.
    """
    if not optimizer.built:
        with keras.name_scope(optimizer.name, caller=optimizer):
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
    """Lets a TensorFlow optimizer find its slots after the model's variables were recreated.

    The optimizer looks up the slots of a Keras variable by the TensorFlow variable inside of it,
    and this TensorFlow variable has been replaced.
    """
    variables, key_of = optimized_variables(optimizer), internals.VARIABLE_KEY.of(optimizer)
    numbers = internals.NUMBERS_OF_VARIABLES.of(optimizer)
    now = {key: key_of(variables[number]) for key, number in numbers.items()}
    for name, kept in tuple(vars(optimizer).items()):
        if isinstance(kept, dict) and now.keys() & kept.keys():
            setattr(optimizer, name, {now.get(key, key): value for key, value in kept.items()})
        elif isinstance(kept, set) and now.keys() & kept:
            setattr(optimizer, name, {now.get(key, key) for key in kept})


def move_optimizer(optimizer: Any, strategy: Any) -> Any:
    """Lets a TensorFlow optimizer make and update its state in a strategy's scope.

    Returns the strategy that the optimizer used before.
    """
    name = _name_of_strategy(optimizer)
    before = getattr(optimizer, name)
    setattr(optimizer, name, strategy)
    return before


def _name_of_strategy(optimizer: Any) -> str:
    """Returns the attribute in which a TensorFlow optimizer stores its strategy."""
    name = internals.STRATEGY_OF_OPTIMIZER.attribute
    if name in vars(optimizer):
        return name
    found = [one for one, value in vars(optimizer).items() if hasattr(value, "extended")]
    if len(found) != 1:
        raise internals.STRATEGY_OF_OPTIMIZER.missing()
    return found[0]


def copy_of_optimizer(optimizer: Any, strategy: object) -> Any:
    """Returns a copy of a TensorFlow optimizer that updates the same variables under `strategy`."""
    copy = object.__new__(type(optimizer))
    vars(copy).update(vars(optimizer))
    vars(copy)[_name_of_strategy(optimizer)] = strategy
    return copy


def referenced_variables(
    optimizer: keras.Optimizer, variables: Iterable[keras.Variable]
) -> list[Any]:
    """Returns, for each variable of an optimizer, the model's variable to which it belongs.

    Keras relates the two variables only by their paths. The path of an optimizer's variable has the
    path of the model's variable in it, with underscores in place of slashes, followed by a name
    such as ``momentum``. For a variable that belongs to no weight, the variable itself is returned.
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
