"""Checks that all workers of a job make the same call, before the call begins."""

from __future__ import annotations

import inspect
from collections.abc import Generator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import keras

from kerasdist import keras_compat
from kerasdist.agreement import description
from kerasdist.backends import registry
from kerasdist.backends.base import random_states
from kerasdist.backends.base.interface import ReplicaSet
from kerasdist.callbacks import on_workers
from kerasdist.config import draws, most_examples_at_once
from kerasdist.core.context import replaced
from kerasdist.job.job import Job

# The advice in the error for workers that make different calls.
_ADVICE = (
    "All of them must run the same script in the same environment, with the same data and the same "
    "seed. If each worker has data of its own, pass a dataset with "
    "InputOptions(auto_shard_policy=AutoShardPolicy.OFF)."
)


def given(replicas: ReplicaSet, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the facts about a call's arguments that must be equal on all workers."""
    job = replicas.job
    # If `fit` calls `evaluate`, the workers have already compared the arguments of `fit`.
    if job is None or job.is_watched:
        return {}
    read = (arguments.get(name) for name in ("x", "validation_data"))
    replicas.first_batches.drawn_by_threads = any(map(keras_compat.has_threads, read))
    return description.facts_of_call(arguments, job, on_workers.CHANGE_TRAINING)


@contextmanager
def working(
    name: str, replicas: ReplicaSet, model: Any, facts: Mapping[str, Any] | None = None
) -> Generator[None]:
    """Returns a context for a call such as `train_on_batch`, which all workers make.

    In the context, variables are made on the devices of the replicas. When the context is entered,
    the workers compare their models and `facts`.
    """
    job = replicas.job
    with replicas.placement(), nullcontext() if job is None else job.translating_failures(name):
        if job is not None:
            own = {} if description.is_compared(model) else description.facts_of(model, anew=True)
            if own or facts:
                _agree(job, name, model, own, {**(facts or {})})
        yield


@contextmanager
def calling(
    name: str,
    job: Job,
    replicas: ReplicaSet,
    call: inspect.BoundArguments,
    facts: Mapping[str, Any],
) -> Generator[None]:
    """Returns a context for `fit`, `evaluate` or `predict`.

    When the context is entered, the workers compare their calls.
    """
    model, *_ = call.args
    is_inner = job.is_watched
    with job.translating_failures(name):
        if is_inner:
            # This call is made inside of another, such as `fit`. First, the workers compare the
            # batches that the outer call has read so far.
            replicas.first_batches.require_equal_since(f"the call of {name}")
        else:
            replicas.first_batches.history.clear()
        own = {} if is_inner else description.facts_of(model, anew=name == "fit")
        # Before the first step, all workers together give new variables the chief's values. Without
        # this comparison, a worker with more new variables would then wait for the others.
        own["new variables in the scope"] = len(replicas.initial_broadcast.waiting())
        _agree(job, name, model, own, {**facts, **_of_data(call.arguments)})
        if not is_inner:
            replicas.first_batches.clear()
        random_states.ensure_equal(job)
        try:
            with _in_call(job, replicas, call.arguments):
                yield
            if not is_inner:
                job.compare_collectives(f"the end of {name}")
        finally:
            if not is_inner:  # later calls, such as train_on_batch, begin with an empty history
                replicas.first_batches.history.clear()


@contextmanager
def _in_call(job: Job, replicas: ReplicaSet, arguments: Mapping[str, Any]) -> Generator[None]:
    """Sets two attributes of `replicas` while the block runs.

    `is_in_call` is True. `batch_logs_matter` is True if any worker prints the logs of batches, or
    has a callback that gets them.
    """
    outer = replicas.batch_logs_matter
    callbacks = arguments.get("callbacks")
    acts = any(map(_acts_on_batches, keras_compat.callbacks_of(callbacks)))
    if isinstance(callbacks, keras.callbacks.CallbackList):
        own = outer or acts
    else:
        own = bool(arguments.get("verbose")) or acts
    matter = any(job.all_gather_object("logs of batches", own))
    with replaced(replicas, "batch_logs_matter", matter), replaced(replicas, "is_in_call", True):
        yield


def _acts_on_batches(callback: keras.callbacks.Callback) -> bool:
    return keras_compat.overrides(callback, keras_compat.BATCH_EVENTS)


def _agree(
    job: Job, name: str, model: keras.Model, own: dict[str, Any], given: dict[str, Any]
) -> None:
    job.assert_equal(f"call of {name}", {"settings": _settings(), **own, **given}, _ADVICE)
    if own:
        description.mark_compared(model, own)


def _settings() -> dict[str, Any]:
    config = keras.config
    own = {"epsilon": config.epsilon(), "floatx": config.floatx(), "draws": draws()}
    own["most examples at once"] = most_examples_at_once()
    return {**own, **registry.current().settings()}


def _of_data(arguments: Mapping[str, Any]) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    for name in ("x", "validation_data"):
        adapter = arguments.get(name)
        if keras_compat.is_data_adapter(adapter):
            facts[f"number of batches of {name}"] = adapter.num_batches
    return facts
