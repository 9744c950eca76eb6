"""Makes Keras's losses and optimizers work in a scope, outside of replicas, as on one device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import keras
import tensorflow as tf

from kerasdist import keras_compat
from kerasdist.backends.tensorflow.private.scopes import (
    NativeScope,
    on_one_copy,
    run_without_merge_call,
)
from kerasdist.backends.tensorflow.private.strategies import ours
from kerasdist.backends.tensorflow.replica.variables import (
    adopt,
    check_mirrored,
    copies,
    native,
    with_inner,
)
from kerasdist.core.context import current, replaced


def serve(native_strategy: tf.distribute.Strategy) -> None:
    """Makes losses and optimizers work outside of replicas in this strategy's scope."""
    _install()
    ours.add(native_strategy)


@cache
def _install() -> None:
    keras_compat.install(
        scale_outside=_scale_loss, apply_outside=_apply, build=_build, slot=_make_state
    )


def _scale_loss(original: Callable[[Any], Any], value: object) -> Any:
    """Leaves a loss unscaled outside of replicas, where it is the loss of the whole batch.

    Keras itself divides a loss by the number of replicas wherever a strategy's scope is open.
    """
    if current.replica is None and tf.distribute.get_strategy() in ours:
        return value
    return original(value)


def _apply(
    original: Callable[..., Any], optimizer: Any, grads: Any, trainable_variables: Any = None
) -> Any:
    """Outside of replicas, updates all copies of the variables with the same gradients.

    Keras's own ``apply`` would call ``merge_call``, which only replicas can call.
    """
    if current.replica is not None or current.applies:
        return original(optimizer, grads, trainable_variables)
    grads = list(grads)
    variables = None if trainable_variables is None else list(trainable_variables)
    known = keras_compat.optimized_variables(optimizer) if variables is None else variables
    native_strategy = _native_strategy_of([*known, *optimizer.variables[:1]])
    if native_strategy is None or not grads:
        return original(optimizer, grads, variables)
    with NativeScope(native_strategy):
        return apply_everywhere(native_strategy, optimizer, grads, variables)


def _build(original: Callable[..., Any], optimizer: Any, variables: Any) -> Any:
    """Before an optimizer is built, mirrors variables that were made outside of the scope."""
    variables = list(variables)
    native_strategy = _native_strategy_of([*variables, *optimizer.variables[:1]])
    if native_strategy is not None:
        with tf.init_scope(), NativeScope(native_strategy):
            adopt(optimizer, native_strategy, variables)
    return original(optimizer, variables)


def apply_everywhere(
    native_strategy: tf.distribute.Strategy, optimizer: Any, gradients: list[Any], variables: Any
) -> Any:
    """Updates every copy of the variables by gradients that are sums over all replicas.

    If any gradient has a component on each device, each device updates its own copies, and clips,
    scales and accumulates gradients itself. Otherwise gradients are processed once for all copies.
    """
    known = keras_compat.optimized_variables(optimizer) if variables is None else variables
    with tf.init_scope():
        adopt(optimizer, native_strategy, known)
        if not optimizer.built and known:
            optimizer.build(known)
    check_mirrored(optimizer.variables, native_strategy, "the optimizer")

    def apply() -> Any:
        # A `Trial` records the gradients of one update. All devices have the same gradients, so in
        # a trial only the first device's gradients are used.
        given = gradients if current.trial is None else [copies(one)[0] for one in gradients]
        if not any(isinstance(one, tf.distribute.DistributedValues) for one in given):
            return keras_compat.apply_combined_gradients(optimizer, given, variables)
        for index, device in enumerate(native_strategy.extended.worker_devices):
            own = [held[index % len(held)] for held in map(copies, gradients)]
            with tf.device(device), on_one_copy(index) as it, _moved(optimizer, it):
                keras_compat.apply_combined_gradients(optimizer, own, variables)
        return None

    # The update calls ``apply`` of the optimizer, and of the inner optimizer of a
    # LossScaleOptimizer. These calls reach the hook `_apply`. While `current.applies` is set, the
    # hook calls Keras's own ``apply``, and does not begin another update.
    with replaced(current, "applies", True):
        return run_without_merge_call(apply)


@contextmanager
def _moved(optimizer: keras.Optimizer, strategy: object) -> Iterator[None]:
    """Moves an optimizer to another strategy until the block ends."""
    before = [(one, keras_compat.move_optimizer(one, strategy)) for one in with_inner(optimizer)]
    try:
        yield
    finally:
        for one, its_own in before:
            keras_compat.move_optimizer(one, its_own)


def _make_state(
    original: Callable[..., Any],
    optimizer: Any,
    reference_variable: Any,  # some optimizers pass this argument by name
    *args: object,
    **kwargs: object,
) -> Any:
    """Makes an optimizer's variable in the scope of the optimizer's or the model's strategy.

    So users need not call ``optimizer.build`` inside of the scope.
    """
    native_strategy = None
    if not tf.distribute.has_strategy():
        native_strategy = _native_strategy_of([reference_variable, *optimizer.variables[:1]])
    if native_strategy is None:
        return original(optimizer, reference_variable, *args, **kwargs)
    with NativeScope(native_strategy):
        keras_compat.move_optimizer(optimizer, native_strategy)
        return original(optimizer, reference_variable, *args, **kwargs)


def _native_strategy_of(variables: Sequence[Any]) -> tf.distribute.Strategy | None:
    """Returns the strategy whose scope is open; if no scope is open, the variables' strategy.

    Returns None in replica code, and if the strategy is not one that kerasdist made.
    """
    here = tf.distribute.get_strategy()
    if tf.distribute.has_strategy():
        is_ours = here in ours and tf.distribute.in_cross_replica_context()
        return here if is_ours else None
    natives = [native(variable) for variable in variables]
    return next(
        (
            native_strategy
            for native_strategy in list(ours)
            if any(native_strategy.extended.variable_created_in_scope(one) for one in natives)
        ),
        None,
    )
