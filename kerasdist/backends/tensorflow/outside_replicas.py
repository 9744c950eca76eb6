"""Lets Keras's losses and optimizers compute in a scope, outside of replicas, as on one device."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any
from weakref import WeakSet

import keras
import tensorflow as tf

from kerasdist import context, keras_compat
from kerasdist.backends.tensorflow import divided_state
from kerasdist.backends.tensorflow.adoption import adopt, with_inner
from kerasdist.backends.tensorflow.private.scopes import (
    EngineScope,
    cross_replica_code_without_merge_call,
    on_one_copy,
)
from kerasdist.backends.tensorflow.variables import check_mirrored, copies, native
from kerasdist.training import probe

# The strategies of ``tf.distribute`` that kerasdist made. A user's own are left to Keras.
_engines: WeakSet[tf.distribute.Strategy] = WeakSet()


class _Here(threading.local):
    """Whether the calling thread is inside of `apply_everywhere`."""

    is_applying = False


_here = _Here()


def serve(engine: tf.distribute.Strategy) -> None:
    """Lets losses and optimizers work outside of replicas in this strategy's scope."""
    _install()
    _engines.add(engine)


@cache
def _install() -> None:
    keras_compat.install_outside_replicas(
        scale_loss=_scale_loss, apply=_apply, build=_build, make_state=_make_state
    )


def _scale_loss(original: Callable[[Any], Any], value: Any) -> Any:
    """Does not scale a loss outside of replicas, where it covers the whole batch.

    Keras divides it by the number of replicas wherever a strategy's scope is open.
    """
    if context.replica() is None and tf.distribute.get_strategy() in _engines:
        return value
    return original(value)


def _apply(
    original: Callable[..., Any], optimizer: Any, grads: Any, trainable_variables: Any = None
) -> Any:
    """Gives all copies of the variables the same update, from one set of gradients.

    Keras's own ``apply`` calls ``merge_call``, which only replicas can call.
    """
    if context.replica() is not None or _here.is_applying:
        return original(optimizer, grads, trainable_variables)
    grads = list(grads)
    variables = None if trainable_variables is None else list(trainable_variables)
    known = keras_compat.optimized_variables(optimizer) if variables is None else variables
    engine = _engine_of([*known, *optimizer.variables[:1]])
    if engine is None or not grads:
        return original(optimizer, grads, variables)
    with _scope_of(engine):
        return apply_everywhere(engine, optimizer, grads, variables)


def _build(original: Callable[..., Any], optimizer: Any, variables: Any) -> Any:
    """Mirrors variables from outside of the scope before an optimizer indexes them."""
    variables = list(variables)
    engine = _engine_of([*variables, *optimizer.variables[:1]])
    if engine is not None:
        with tf.init_scope(), _scope_of(engine):
            adopt(optimizer, engine, variables)
    return original(optimizer, variables)


def _scope_of(engine: tf.distribute.Strategy) -> AbstractContextManager[Any]:
    """Opens an engine's scope, if it is not open."""
    return nullcontext() if tf.distribute.get_strategy() is engine else EngineScope(engine)


def apply_everywhere(
    engine: tf.distribute.Strategy, optimizer: Any, gradients: list[Any], variables: Any
) -> Any:
    """Updates every copy of the variables by gradients that are summed over all replicas.

    Of gradients with a sum on each device, each device updates its own copy: it clips, scales and
    accumulates by itself. A single gradient is changed once, and the result is copied. Where the
    replicas divide slots, each updates its part of the weights, and they gather the parts.
    """
    known = keras_compat.optimized_variables(optimizer) if variables is None else variables
    with tf.init_scope():
        adopt(optimizer, engine, known)
        if not optimizer.built and known:
            optimizer.build(known)
    check_mirrored(optimizer.variables, engine, "the optimizer")
    # Keras's own ``apply`` does the rest, for the inner optimizer of a LossScaleOptimizer too.
    before, _here.is_applying = _here.is_applying, True
    try:
        with cross_replica_code_without_merge_call():
            parts = divided_state.divisions(optimizer)
            is_one = not any(isinstance(one, tf.distribute.DistributedValues) for one in gradients)
            if is_one and not parts:
                return keras_compat.apply_combined_gradients(optimizer, gradients, variables)
            for index, device in enumerate(engine.extended.worker_devices):
                own = [held[index % len(held)] for held in map(copies, gradients)]
                recorded = probe.paused() if index else nullcontext()
                with (
                    recorded,
                    tf.device(device),
                    on_one_copy(index, parts) as it,
                    _moved(optimizer, it),
                ):
                    keras_compat.apply_combined_gradients(optimizer, own, variables)
            if parts:
                divided_state.gather(engine, parts, known)
            return None
    finally:
        _here.is_applying = before


@contextmanager
def _moved(optimizer: Any, strategy: Any) -> Iterator[None]:
    """Makes the optimizer update variables of another strategy, in the block."""
    before = [(one, keras_compat.move_optimizer(one, strategy)) for one in with_inner(optimizer)]
    try:
        yield
    finally:
        for one, its_own in before:
            keras_compat.move_optimizer(one, its_own)


def _make_state(original: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    """Makes an optimizer's variable in the scope of its strategy, or of the model's strategy.

    So users need not call ``optimizer.build`` in the scope.
    """
    if tf.distribute.has_strategy():
        return original(optimizer, *args, **kwargs)
    reference = kwargs.get("reference_variable", args[0] if args else None)
    held = [reference] if isinstance(reference, keras.Variable) else []
    engine = _engine_of([*held, *optimizer.variables[:1]])
    if engine is None:
        return original(optimizer, *args, **kwargs)
    with EngineScope(engine):
        if not keras_compat.belongs_to(optimizer, engine):
            keras_compat.adopt_optimizer(optimizer, engine)
        return original(optimizer, *args, **kwargs)


def _engine_of(variables: Sequence[Any]) -> tf.distribute.Strategy | None:
    """Returns the strategy whose scope is open, else the variables'; None for plain Keras."""
    here = tf.distribute.get_strategy()
    if tf.distribute.has_strategy():
        is_ours = here in _engines and tf.distribute.in_cross_replica_context()
        return here if is_ours else None
    natives = [native(variable) for variable in variables]
    return next(
        (
            engine
            for engine in list(_engines)
            if any(engine.extended.variable_created_in_scope(one) for one in natives)
        ),
        None,
    )
