"""Helpers for Keras's loops: state that is stored in a model, building a model, step logs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from typing import Any

from kerasdist.core.internals import internals_of
from kerasdist.keras_compat import internals
from kerasdist.keras_compat.models import backend_name, ops
from kerasdist.keras_compat.thread_state import name_of_scope
from kerasdist.keras_compat.variables import stored_values


@cache
def require_each_fit() -> None:
    """Raises a `VersionError` if Keras lacks something that every `fit` over replicas needs."""
    for internal in internals_of(internals).values():
        if internal.in_each_fit and backend_name() in (internal.backends or (backend_name(),)):
            internal.require()
    if name_of_scope() is None:  # this version of Keras stores stateless scopes elsewhere
        raise internals.THREAD_STATE.missing()


def build_symbolically(model: Any, batch: object) -> None:
    """Makes the variables that a training step needs, from a batch's types and shapes."""
    internals.SYMBOLIC_BUILD.of(model)(data_batch=batch)


def batch_spec(iterator: Any) -> Any:
    """Returns the types and shapes of the batches that an iterator of Keras reads on TensorFlow."""
    begin = getattr(iterator, internals.EPOCH_ITERATOR.attribute, None)
    if begin is None:
        return iterator.data_adapter.get_tf_dataset().element_spec
    return begin().element_spec


def uses_torch_compile(model: Any) -> bool:
    """Returns whether Keras would compile a model's steps with torch's compiler."""
    if model.run_eagerly or not model.jit_compile:
        return False
    return internals.USES_TORCH_COMPILE.of(model)()


# On JAX, Keras's loops take the values out of the variables while they run their steps.


def is_state_synced(model: Any) -> bool:
    """Returns whether a model's variables hold values; on JAX they hold none while a step runs."""
    if not state_of(model):
        return True
    variables = [*model.trainable_variables, *model.non_trainable_variables]
    return not any(value is None for value in stored_values(variables))


def state_of(model: Any) -> Any:
    """Returns the values that steps have taken out of the variables; None if there are none."""
    return getattr(model, internals.JAX_STATE.attribute, None)


def put_state(model: Any, state: Mapping[str, Any]) -> None:
    """Sets the values that ``jax_state_sync`` puts back into the variables."""
    setattr(model, internals.JAX_STATE.attribute, dict(state))


# The following functions do not use that state.


def drop_compiled(model: Any) -> None:
    """Makes a TensorFlow model compile its steps again."""
    model.train_function = model.test_function = model.predict_function = None


def skip_batches(model: Any, count: int, unread: int, logs: Any, then: Callable[[], None]) -> None:
    """Makes a model's next training steps skip `count` batches, and then calls `then`.

    Keras's loop looks up `train_function` for each step, so `train_function` is replaced until the
    batches are skipped. The loop calls `train_function` with a list of batches on PyTorch, with an
    iterator on TensorFlow, and with the state and an iterator on JAX. The iterator begins after the
    first `unread` of the batches to skip, so only the others are read here. A step that skips
    batches returns `logs`.
    """
    train = model.train_function
    done = 0

    def skip(*arguments: Any) -> Any:
        nonlocal done
        *state, batches = arguments
        begin, done = done, done + model.steps_per_execution
        if not isinstance(batches, list):
            for _ in range(max(begin, unread), done):
                next(batches, None)
        if done >= count:
            model.train_function = train
            then()
        return (logs, *state) if state else logs

    model.train_function = skip


def numbers_of(logs: object) -> dict[str, Any]:
    """Returns the logs of a step in the form in which Keras passes them to callbacks."""
    numbers: dict[str, Any] = {}
    for name, value in sorted(logs.items()) if isinstance(logs, dict) else ():
        if isinstance(value, dict):
            numbers |= numbers_of(value)
            continue
        numbers[name] = ops.convert_to_numpy(value) if ops.is_tensor(value) else value
        with suppress(TypeError, ValueError):
            numbers[name] = float(numbers[name])
    return numbers
