"""Finds the user code in a model's training step."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import keras

from kerasdist import keras_compat
from kerasdist.check.comparison import Comparison
from kerasdist.training.trainer import defined_by_model

_SHOWN = 6


def places(model: keras.Model, comparison: Comparison) -> str:
    """Returns the user code that may make the step differ, with file and line.

    If only metrics differ, that is the metrics' code; if the model's outputs are equal, the losses
    and the step; if gradients are equal, too, the optimizer.
    """
    differ = {one.name for one in comparison.beyond_rounding}
    changes = {f"change of {one.name}" for one in comparison.found.weights}
    if differ <= changes and comparison.found.gradients:
        name = getattr(model.optimizer, "name", "of the step")
        return f"the optimizer {name}, which gets equal gradients and changes weights otherwise"
    logs = {one.name for one in comparison.found.logs} - {"loss"}
    outputs = comparison.found.outputs
    suspects: list[Callable[..., Any]] = []
    if differ <= logs:
        suspects = list(_metrics_of_user(model))
    elif outputs and not outputs[0].is_more_than_rounding:
        suspects = [*_steps_of_user(model), *_adding_losses(model)]
    elif outputs:
        suspects = [*_layers_of_user(model), *_steps_of_user(model)]
    found = list(dict.fromkeys(map(_located, suspects or user_code(model))))
    more = f" or {len(found) - _SHOWN} more functions" if len(found) > _SHOWN else ""
    return " or ".join(found[:_SHOWN]) + more


def user_code(model: keras.Model) -> Iterator[Callable[..., Any]]:
    """Yields the user-defined functions in a model's training step."""
    yield from _steps_of_user(model)
    yield from _metrics_of_user(model)
    yield from _layers_of_user(model)


def _layers_of_user(model: keras.Model) -> Iterator[Callable[..., Any]]:
    for layer in [model, *keras_compat.flat_layers(model)]:
        yield from _of_user([defined_by_model(type(layer), "call")])
        if isinstance(layer, keras.layers.Lambda):
            yield layer.function
        activation = getattr(layer, "activation", None)
        if inspect.isfunction(activation):
            yield from _of_user([activation])
    for operation in getattr(model, "operations", ()):
        if not isinstance(operation, keras.layers.Layer):
            yield type(operation)


def _steps_of_user(model: keras.Model) -> Iterator[Callable[..., Any]]:
    for name in ("train_step", "compute_loss"):
        yield from _of_user([defined_by_model(type(model), name)])
    for loss in keras.tree.flatten(keras_compat.compiled_losses(model)):
        yield from _of_user(_functions_of(loss))


def _adding_losses(model: keras.Model) -> Iterator[Callable[..., Any]]:
    """Yields the calls of layers whose code names ``add_loss``."""
    for call in _layers_of_user(model):
        code = getattr(inspect.unwrap(call), "__code__", None)
        if code is not None and "add_loss" in code.co_names:
            yield call


def _metrics_of_user(model: keras.Model) -> Iterator[Callable[..., Any]]:
    yield from _of_user([defined_by_model(type(model), "compute_metrics")])
    for metric in keras_compat.compiled_metrics(model):
        yield from _of_user(_functions_of(metric))
    for metric in model.metrics:
        yield from _of_user(_functions_of(metric))


def _functions_of(loss_or_metric: object) -> list[Any]:
    """Returns the functions that compute a loss or a metric."""
    if inspect.isclass(loss_or_metric):
        loss_or_metric = loss_or_metric.__new__(loss_or_metric)
    if isinstance(loss_or_metric, keras.losses.Loss):
        return [defined_by_model(type(loss_or_metric), "call"), vars(loss_or_metric).get("fn")]
    if isinstance(loss_or_metric, keras.metrics.Metric):
        update = defined_by_model(type(loss_or_metric), "update_state")
        return [update, vars(loss_or_metric).get("_fn")]
    return [loss_or_metric] if callable(loss_or_metric) else []


def _of_user(functions: Sequence[Any]) -> Iterator[Callable[..., Any]]:
    for function in functions:
        if callable(function) and not keras_compat.is_builtin(function):
            yield function


def _located(function: Any) -> str:
    name = getattr(function, "__qualname__", None) or type(function).__name__
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return name
    return f"{name} ({Path(code.co_filename).name}, line {code.co_firstlineno})"
