"""Calls that all workers of a job make together: they agree on them before they begin."""

from __future__ import annotations

import inspect
from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import keras

from kerasdist import keras_seam
from kerasdist.backends import registry
from kerasdist.backends.base import ReplicaSet
from kerasdist.binding import Binding
from kerasdist.training import equal_randomness

# Arguments of fit, evaluate and predict that say how many steps there are.
_COUNTS = (
    "epochs",
    "initial_epoch",
    "batch_size",
    "steps_per_epoch",
    "steps",
    "validation_steps",
    "validation_batch_size",
    "validation_freq",
)

# What of an optimizer's configuration is not said by its variables.
_PLAIN = (bool, int, float, str, type(None))


def calling(
    name: str, binding: Binding, call: inspect.BoundArguments
) -> AbstractContextManager[None]:
    """Returns a context for a call of `fit`, `evaluate` or `predict` by all workers.

    Args:
        name: Which of them.
        binding: What the model was made under.
        call: Its arguments, the data as an adapter of ours.
    """
    job = binding.replicas.job
    return nullcontext() if job is None else _calling(name, binding.replicas, call)


def working(name: str, replicas: ReplicaSet) -> AbstractContextManager[None]:
    """Returns a context for work that needs all workers.

    Args:
        name: What to call it in messages.
        replicas: The devices that do it.
    """
    return nullcontext() if replicas.job is None else replicas.job.explaining(name)


@contextmanager
def _calling(name: str, replicas: ReplicaSet, call: inspect.BoundArguments) -> Generator[None]:
    job = replicas.job
    assert job is not None
    model, *_ = call.args
    with job.explaining(name):
        job.agree(f"call of {name}", {**_of_model(model), **_of_data(call.arguments)})
        equal_randomness.ensure(job, registry.current())
        with replicas.calling(), _telling_of_logs(replicas, call.arguments):
            yield


@contextmanager
def _telling_of_logs(replicas: ReplicaSet, arguments: Mapping[str, Any]) -> Generator[None]:
    """Says to the replicas whether somebody, on any worker, looks at the logs of a batch."""
    assert replicas.job is not None
    outer, callbacks = replicas.batch_logs_matter, arguments.get("callbacks")
    if isinstance(callbacks, keras.callbacks.CallbackList):
        own = outer or any(map(_acts_on_batches, callbacks.callbacks))
    else:
        given = keras.tree.flatten(callbacks) if callbacks else []
        own = bool(arguments.get("verbose")) or any(map(_acts_on_batches, given))
    replicas.batch_logs_matter = any(replicas.job.exchange("logs of batches", own))
    try:
        yield
    finally:
        replicas.batch_logs_matter = outer


def _acts_on_batches(callback: Any) -> bool:
    return keras_seam.hears_of(callback, keras_seam.BATCH_EVENTS)


def _of_model(model: Any) -> dict[str, Any]:
    facts: dict[str, Any] = {"model": f"{type(model).__name__} {model.name!r}"}
    optimizer = model.optimizer if model.compiled else None
    if optimizer is not None:
        facts["optimizer"] = type(optimizer).__name__
        for name, value in optimizer.get_config().items():
            if isinstance(value, _PLAIN):
                facts[f"optimizer.{name}"] = value
    return facts


def _of_data(arguments: Mapping[str, Any]) -> dict[str, Any]:
    facts = {
        f"argument {name}": arguments[name]
        for name in _COUNTS
        if isinstance(arguments.get(name), int)
    }
    for name in ("x", "validation_data"):
        adapter = arguments.get(name)
        if isinstance(adapter, keras_seam.DataAdapter):
            facts[f"number of batches of {name}"] = adapter.num_batches
    return facts
