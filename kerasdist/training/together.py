"""Calls that all workers of a job make together: they agree on them before they begin."""

from __future__ import annotations

import inspect
from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import keras

from kerasdist import keras_seam
from kerasdist.agreement import calls, code, models
from kerasdist.backends import registry
from kerasdist.backends.base import ReplicaSet
from kerasdist.binding import Binding
from kerasdist.callbacks import on_workers
from kerasdist.job.job import Job
from kerasdist.training import equal_randomness

# What is said where workers have other data than the others.
_ADVICE = (
    "All of them must run the same script in the same environment, with the same data and the same "
    "seed. If each worker has data of its own, pass a dataset with "
    "InputOptions(auto_shard_policy=AutoShardPolicy.OFF)."
)


def given(binding: Binding, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what must be equal on all workers of a call's arguments; nothing without others.

    Args:
        binding: What the model was made under.
        arguments: The arguments as the user gave them, by name.
    """
    job = binding.replicas.job
    # In `fit`, Keras calls `evaluate` with what `fit` was given.
    if job is None or job.is_watched:
        return {}
    return calls.facts_of(arguments, job, on_workers.CHANGE_TRAINING)


def note_compile(model: Any, binding: Binding, arguments: Mapping[str, Any]) -> None:
    """Notes what `compile` was given, for workers to compare.

    Args:
        model: The model.
        binding: What it was made under.
        arguments: The arguments, by name.
    """
    if binding.replicas.job is not None:
        models.note_compile(model, arguments)


def calling(
    name: str, binding: Binding, call: inspect.BoundArguments, facts: Mapping[str, Any]
) -> AbstractContextManager[None]:
    """Returns a context for a call of `fit`, `evaluate` or `predict` by all workers.

    Args:
        name: Which of them.
        binding: What the model was made under.
        call: Its arguments, the data as an adapter of ours.
        facts: What `given` returned for the arguments before.
    """
    job = binding.replicas.job
    return nullcontext() if job is None else _calling(name, binding.replicas, call, facts)


def working(
    name: str, replicas: ReplicaSet, model: Any, facts: Mapping[str, Any] | None = None
) -> AbstractContextManager[None]:
    """Returns a context for a step of a model that needs all workers.

    Args:
        name: What to call it in messages.
        replicas: The devices that do it.
        model: The model; workers compare it at the first step after `compile`.
        facts: What else they compare, each time.
    """
    return nullcontext() if replicas.job is None else _working(name, replicas.job, model, facts)


@contextmanager
def _working(name: str, job: Job, model: Any, facts: Mapping[str, Any] | None) -> Generator[None]:
    with job.explaining(name):
        own = {} if models.is_compared(model) else models.facts_of(model, anew=True)
        if own or facts:
            _agree(job, name, model, own, {**(facts or {})})
        yield


@contextmanager
def _calling(
    name: str, replicas: ReplicaSet, call: inspect.BoundArguments, facts: Mapping[str, Any]
) -> Generator[None]:
    job = replicas.job
    assert job is not None
    model, *_ = call.args
    is_inner = job.is_watched
    with job.explaining(name):
        own = {} if is_inner else models.facts_of(model, anew=name == "fit")
        _agree(job, name, model, own, {**facts, **_of_data(call.arguments)})
        if not is_inner:
            replicas.first_batches.clear()
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


def _agree(job: Job, name: str, model: Any, own: dict[str, Any], given: dict[str, Any]) -> None:
    facts = {**own, **given}
    facts = facts if job.has_one_python else code.without(facts)
    job.agree(f"call of {name}", facts, _ADVICE)
    if own:
        models.note_compared(model, own)


def _of_data(arguments: Mapping[str, Any]) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    for name in ("x", "validation_data"):
        adapter = arguments.get(name)
        if isinstance(adapter, keras_seam.DataAdapter):
            facts[f"number of batches of {name}"] = adapter.num_batches
    return facts
