"""What Keras's loops keep of a model, and how a model is built for them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from kerasdist.core.internals import internals_of
from kerasdist.keras_compat import internals
from kerasdist.keras_compat.models import backend_name


@cache
def require_each_fit() -> None:
    """Raises a `VersionError` if Keras lacks something that every `fit` over replicas needs."""
    for internal in internals_of(internals).values():
        if internal.in_each_fit and backend_name() in (internal.backends or (backend_name(),)):
            internal.require()


def build_symbolically(model: Any, batch: object) -> None:
    """Makes what a model's training step needs, by the types and shapes of a batch."""
    internals.SYMBOLIC_BUILD.of(model)(data_batch=batch)


def batch_spec(iterator: Any) -> Any:
    """Returns the types and shapes of what one of Keras's iterators on TensorFlow yields."""
    return internals.EPOCH_ITERATOR.of(iterator)().element_spec


def uses_torch_compile(model: Any) -> bool:
    """Returns whether Keras would compile a model's steps by torch's compiler."""
    if model.run_eagerly or not model.jit_compile:
        return False
    return internals.USES_TORCH_COMPILE.of(model)()


# On JAX, Keras's loops take the values out of the variables for the time of their steps.


def is_state_synced(model: Any) -> bool:
    """Returns whether a model's variables have their values."""
    return internals.JAX_STATE_SYNCED.of(model)


def state_of(model: Any) -> Any:
    """Returns the values that steps have taken out of the variables; None: none ever did."""
    return getattr(model, internals.JAX_STATE.attribute, None)


def put_state(model: Any, state: Mapping[str, Any]) -> None:
    """Sets what ``jax_state_sync`` puts back into the variables."""
    setattr(model, internals.JAX_STATE.attribute, dict(state))


def take_jax_state(model: Any, **which: bool) -> tuple[Any, ...]:
    """Returns the values of variables as Keras's loops ask for them."""
    return internals.GET_JAX_STATE.of(model)(**which)


def purge_variables(model: Any, which: Mapping[str, bool]) -> None:
    """Takes the values out of the variables, as Keras does so that one copy is there."""
    internals.PURGE_VARIABLES.of(model)(**which)
