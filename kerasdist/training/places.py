"""Finds the user code at which replicas' results begin to differ from one device's."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras

from kerasdist import keras_compat
from kerasdist.training.comparison import Comparison
from kerasdist.training.differences import Difference, difference, worst

# By how many roundings the outputs of two equal layers may differ.
_ROUNDINGS = 100


@dataclass(frozen=True)
class LayerDifference:
    """The first layer, in the order of execution, whose output differs.

    Attributes:
        name: The layer's name.
        layer: The layer.
        difference: How the output differs. ``difference.relative`` is infinite if the replicas'
            outputs do not fit that of one device by their shapes.
    """

    name: str
    layer: Any
    difference: Difference


def first_layer(comparison: Comparison) -> LayerDifference | None:
    """Returns the first layer whose output differs; None if none does."""
    # The step's result differs; the layer that causes it may differ far less than the result.
    least = _ROUNDINGS * comparison.precision.epsilon
    for layer, found in comparison.outputs:
        if not found.relative <= least:
            return LayerDifference(layer.name, layer, found)
    return None


def outputs(comparison: Comparison, model: Any) -> Difference | None:
    """Returns how the model's outputs differ, None if the step does not call the model."""
    return worst(found for layer, found in comparison.outputs if layer is model)


def adding_layer(comparison: Comparison) -> Any:
    """Returns the first layer that adds a different loss than on one device, or None."""
    weights = comparison.weights
    for index, (layer, expected) in enumerate(comparison.alone.added.get(None, [])):
        parts = [losses[index] for losses in comparison.added if len(losses) > index]
        if len(parts) != len(weights):
            return None
        received = sum(part * weight for part, weight in zip(parts, weights, strict=True))
        tolerance = comparison.precision.tolerance
        if difference("", expected, received, tolerance).is_more_than_rounding:
            return layer
    return None


def code_of(model: Any, comparison: Comparison) -> str:
    """Returns which user code makes the step differ, with file and line, as far as is known."""
    layer = first_layer(comparison)
    if layer is not None:
        return f"the output of {_called(layer.layer)} differs, the first of all layers"
    adding = adding_layer(comparison)
    if adding is not None:
        return f"what {_called(adding)} gives to add_loss differs"
    differ = {one.name for one in comparison.beyond_rounding}
    logs = set(comparison.alone.result.logs)
    only_metrics = differ and differ <= logs - {"loss"}
    suspects = list(_metrics_of_user(model) if only_metrics else _steps_of_user(model))
    suspects = suspects or list(user_code(model))
    said = " or ".join(dict.fromkeys(map(_located, suspects)))
    return f"all layers' outputs are equal, so look at {said or 'what the step does with them'}"


def user_code(model: Any) -> Iterator[Callable[..., Any]]:
    """Yields the user-defined functions in a model's training step."""
    yield from _steps_of_user(model)
    yield from _metrics_of_user(model)
    for layer in [model, *keras_compat.flat_layers(model)]:
        yield from _of_user([_defined(type(layer), "call")])
        if isinstance(layer, keras.layers.Lambda):
            yield layer.function
        activation = getattr(layer, "activation", None)
        if inspect.isfunction(activation):
            yield from _of_user([activation])
    for operation in getattr(model, "operations", ()):
        if not isinstance(operation, keras.layers.Layer):
            yield type(operation)


def _steps_of_user(model: Any) -> Iterator[Callable[..., Any]]:
    for name in ("train_step", "compute_loss"):
        yield from _of_user([_defined(type(model), name)])
    for loss in keras.tree.flatten(keras_compat.compiled_losses(model)):
        yield from _of_user(_functions_of(loss))


def _metrics_of_user(model: Any) -> Iterator[Callable[..., Any]]:
    yield from _of_user([_defined(type(model), "compute_metrics")])
    for metric in keras.tree.flatten(keras_compat.compiled_metrics(model)):
        yield from _of_user(_functions_of(metric))
    for metric in model.metrics:
        yield from _of_user(_functions_of(metric))


def _functions_of(loss_or_metric: Any) -> list[Any]:
    """Returns the functions that compute a loss or a metric."""
    if inspect.isclass(loss_or_metric):
        loss_or_metric = loss_or_metric.__new__(loss_or_metric)
    if isinstance(loss_or_metric, keras.losses.Loss):
        return [_defined(type(loss_or_metric), "call"), vars(loss_or_metric).get("fn")]
    if isinstance(loss_or_metric, keras.metrics.Metric):
        update = _defined(type(loss_or_metric), "update_state")
        return [update, vars(loss_or_metric).get("_fn")]
    return [loss_or_metric] if callable(loss_or_metric) else []


def _of_user(functions: Sequence[Any]) -> Iterator[Callable[..., Any]]:
    for function in functions:
        if callable(function) and not keras_compat.is_builtin(function):
            yield function


def _defined(owner: type, name: str) -> Any:
    """Returns the function of that name in a class that is not kerasdist's."""
    for parent in owner.__mro__:
        if name in vars(parent) and not parent.__module__.startswith("kerasdist."):
            return vars(parent)[name]
    return None


def _called(layer: Any) -> str:
    function = layer.function if isinstance(layer, keras.layers.Lambda) else None
    function = function or _defined(type(layer), "call")
    if keras_compat.is_builtin(function):
        return f"the layer {layer.name!r} ({type(layer).__name__})"
    return f"the layer {layer.name!r}, {_located(function)},"


def _located(function: Any) -> str:
    name = getattr(function, "__qualname__", None) or type(function).__name__
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return name
    return f"{name} ({Path(code.co_filename).name}, line {code.co_firstlineno})"
