"""Checks that concern models made outside of a strategy's scope, and ``keras.distribution``."""

from __future__ import annotations

import keras

from kerasdist import keras_compat
from kerasdist.core import context, ownership
from kerasdist.core.user_warnings import warn_once
from kerasdist.errors import ScopeError, UnsupportedError
from kerasdist.job.job import current_job

_TRAINING = ("fit", "train_on_batch")


def require_no_scope(model: keras.Model) -> None:
    """Refuses to compile, in a strategy's scope, a model that was made outside of the scope."""
    here = context.strategy_in_force()
    if here.num_replicas_in_sync > 1:
        raise ScopeError(
            "Expected a model made in the scope in which it is compiled. Received: model="
            f"{model.name!r}, made outside of the scope of {here}. Make the model inside of "
            "`with strategy.scope():`, too. To train it on one device, compile it outside."
        )


def require_one_distribution(strategy: object) -> None:
    """Refuses ``keras.distribution`` for a strategy's model, because both would split the batch."""
    theirs = keras.distribution.distribution()
    if theirs is not None:
        raise UnsupportedError(
            f"Expected one distribution of a model. Received: the strategy {strategy} and "
            f"keras.distribution.distribution()={theirs}. Call "
            "keras.distribution.set_distribution(None), or make the model outside of the "
            "strategy's scope."
        )


def require_unwrapped() -> None:
    """Refuses a model without a strategy, in a job, if Keras would wrap the model in DDP.

    Usually a patch prevents the wrapping. The model is refused only if this version of Keras lacks
    the method that the patch replaces.
    """
    wraps = keras_compat.internals.INITIALIZE_DDP
    is_here = keras_compat.backend_name() in wraps.backends
    if is_here and current_job() is not None and wraps.is_gone():
        raise wraps.missing()


def warn(model: keras.Model, call: str) -> None:
    """Warns once that a model runs on one device; in a job, raises an error for training.

    Outside of the scope, there is no warning if another model was made in the scope. Then the user
    clearly wants this model on one device.
    """
    here = context.strategy_in_force()
    strategy = here if here.num_replicas_in_sync > 1 else ownership.unused_strategy()
    if strategy is None:
        return
    job = current_job()
    place = (
        f"model={model.name!r}, made outside of the scope of {strategy}. Make and compile the "
        "model inside of `with strategy.scope():`"
    )
    if job is not None and call in _TRAINING and (strategy is here or not ownership.any_is_used()):
        raise ScopeError(
            f"{job.who} Expected a model made in the scope of the job's strategy: each worker "
            f"would train by itself, on all data. Received: {place}. To train a model on each "
            "worker by itself, make it in the scope of kerasdist.OneDeviceStrategy."
        )
    warn_once(
        model,
        f"Expected a model made in the scope of the strategy. Received: {place}. "
        f"As it is, `{call}` runs on one device, as in plain Keras.",
        "scope",
    )


def take_on(model: keras.Model) -> None:
    """Prepares training of a model that has no strategy, but has layers of a strategy's model."""
    owners = [ownership.strategy_of(variable) for variable in model.variables]
    for owner in {id(one): one for one in owners if one is not None}.values():
        replicas = owner.replica_set
        if replicas is None or owner.num_replicas_in_sync == 1:
            continue
        if replicas.job is not None:
            raise ScopeError(
                f"{replicas.job.who} Expected a model made in the scope of the strategy whose "
                "layers it trains: each worker would train its own copy of them. Received: "
                f"model={model.name!r}, made outside of the scope of {owner}. Make and compile it "
                "inside of `with strategy.scope():`."
            )
        replicas.trainer_class.prepare_other(model, replicas)
