"""Keras's optimizers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras
from keras.src import backend
from keras.src.optimizers.base_optimizer import BaseOptimizer

from kerasdist.keras_seam.models import is_kerass_own

LossScaleOptimizer = keras.optimizers.LossScaleOptimizer


def optimized_variables(optimizer: Any) -> list[Any]:
    """Returns the variables that an optimizer was built for, in its order.

    Args:
        optimizer: A Keras optimizer.
    """
    return list(optimizer._trainable_variables)


def apply_combined_gradients(optimizer: Any, gradients: list[Any], variables: Any) -> None:
    """Does Keras's own part of ``optimizer.apply``, with the gradients of all replicas.

    A user's class that overrides `apply` has had its say in each replica.

    Args:
        optimizer: A Keras optimizer that is built.
        gradients: One for each variable, None where there is none.
        variables: The variables, or None for all that the optimizer knows.
    """
    if isinstance(optimizer, LossScaleOptimizer):
        # On TensorFlow its `apply` insists on being called in a replica.
        optimizer._common_apply(gradients, variables)
    else:
        BaseOptimizer.apply(optimizer, gradients, variables)


def apply_scaled_gradients(optimizer: Any, gradients: list[Any], variables: Any) -> None:
    """Does what ``LossScaleOptimizer.apply`` does, where JAX traces it.

    There Keras's own leaks values out of the branches that it takes for finite and other gradients
    (seen with 3.15.1); its stateless form does not.

    Args:
        optimizer: A ``LossScaleOptimizer``.
        gradients: One for each variable, None where there is none.
        variables: The variables, or None for all that the optimizer knows.
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


def belongs_to(optimizer: Any, strategy: Any) -> bool:
    """Returns whether a TensorFlow optimizer makes and updates its state in a strategy's scope.

    Args:
        optimizer: A Keras optimizer.
        strategy: A ``tf.distribute.Strategy``.
    """
    return optimizer._distribution_strategy is strategy


def adopt_optimizer(optimizer: Any, strategy: Any) -> None:
    """Lets a TensorFlow optimizer make and update its state in a strategy's scope from now on.

    Args:
        optimizer: A Keras optimizer.
        strategy: The ``tf.distribute.Strategy``.
    """
    optimizer._distribution_strategy = strategy


def index_variables(optimizer: Any) -> None:
    """Lets a TensorFlow optimizer find its slots again, after its model's variables were recreated.

    It remembers the framework's variables.

    Args:
        optimizer: A Keras optimizer.
    """
    optimizer._trainable_variables_indices = {
        optimizer._var_key(variable): index
        for index, variable in enumerate(optimizer._trainable_variables)
    }


def move_optimizer(optimizer: Any, strategy: Any) -> Any:
    """Lets a TensorFlow optimizer update variables of another strategy.

    Args:
        optimizer: A Keras optimizer.
        strategy: The ``tf.distribute.Strategy``.

    Returns:
        The strategy that it had before.
    """
    before = optimizer._distribution_strategy
    optimizer._distribution_strategy = strategy
    return before


def adam_slots(optimizer: Any, variables: Iterable[Any]) -> tuple[list[Any], list[Any], list[Any]]:
    """Returns what Adam keeps of each variable: momentums, velocities, and the highest of those.

    Args:
        optimizer: A Keras ``Adam`` or ``AdamW`` that is built.
        variables: Variables that it was built for.

    Returns:
        Keras variables; the last list is empty if it does not keep the highest velocities.
    """
    places = [optimizer._get_variable_index(variable) for variable in variables]
    highest = optimizer._velocity_hats if optimizer.amsgrad else None
    return (
        [optimizer._momentums[place] for place in places],
        [optimizer._velocities[place] for place in places],
        [] if highest is None else [highest[place] for place in places],
    )


def computes_on_gradients(optimizer: Any) -> bool:
    """Returns whether an optimizer does more with gradients than hand them to ``update_step``.

    Args:
        optimizer: A Keras optimizer.
    """
    computing = ("clipnorm", "clipvalue", "global_clipnorm", "loss_scale_factor")
    return (
        not is_kerass_own(type(optimizer))
        or isinstance(optimizer, LossScaleOptimizer)
        or bool(optimizer.gradient_accumulation_steps)
        or any(getattr(optimizer, name) is not None for name in computing)
    )


def referenced_variables(optimizer: Any, variables: Iterable[Any]) -> list[Any]:
    """Returns for each variable of an optimizer the model's variable that it was made for.

    Keras remembers it in the name alone: the path, with underscores, and the slot's name.

    Args:
        optimizer: A Keras optimizer.
        variables: The model's variables.

    Returns:
        One variable each; the optimizer's own where there is no such variable.
    """
    by_prefix = {f"{one.path.replace('/', '_')}_": one for one in variables}

    def reference(variable: Any) -> Any:
        fits = [
            prefix
            for prefix, one in by_prefix.items()
            if prefix in variable.path and one.shape == variable.shape
        ]
        return by_prefix[max(fits, key=len)] if fits else variable

    return [reference(variable) for variable in optimizer.variables]
