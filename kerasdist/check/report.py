"""`compare_with_one_device`: compares a training step with one device, and reports differences."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras

from kerasdist import keras_compat
from kerasdist.backends.base.metering import rows_of
from kerasdist.backends.base.model_trainer import defined_by_user, require_trainer, trainer_of
from kerasdist.check.comparison import Comparison, compare
from kerasdist.check.differences import Difference, worst
from kerasdist.errors import ScopeError
from kerasdist.training import worker_agreement

# How many functions a report names at most.
_PLACES = 6


@dataclass(frozen=True)
class OneDeviceComparison:
    """A comparison of a training step under a strategy with the same step on one device.

    Example::

        comparison = kd.compare_with_one_device(model, x, y)
        print(comparison)

    Attributes:
        examples: How many examples the batch has.
        strategy: The model's strategy, as text.
        loss: The difference of the loss that the step reported; None if it reported no loss.
        outputs: The largest difference of the model's outputs; None if the step does not call the
            model. In a job, the outputs are those of one worker's replicas.
        gradients: The gradient that differs most; None if no optimizer was called.
        weights: The trainable variable whose change differs most. Only elements with equal
            gradients count. Otherwise a rounding error of a tiny gradient would count as a large
            difference, because the first step of Adam has the size of the learning rate for any
            gradient.
        metrics: The metric that differs most; None if the step reported no metric.
        moving_statistics: The non-trainable variable, such as a moving mean, whose change differs
            most; None if there is no such variable.
        more_than_rounding: All quantities that differ by more than rounding can explain, in the
            order of a step: loss, metrics, gradients, variables.
        where: The user code that may mix examples; empty if nothing differs.
        draws_differ: Why the two steps could not get equal random numbers; None if they got them.
            Without equal random numbers, a difference counts only if it is far larger than the
            differences between repetitions of the step on one device.
    """

    examples: int
    strategy: str
    loss: Difference | None
    outputs: Difference | None
    gradients: Difference | None
    weights: Difference | None
    metrics: Difference | None
    moving_statistics: Difference | None
    more_than_rounding: tuple[Difference, ...]
    where: str
    draws_differ: str | None

    @property
    def equal(self) -> bool:
        """Whether the strategy computes what one device computes, except for rounding."""
        return not self.more_than_rounding

    def __str__(self) -> str:
        verb = "computes" if self.equal else "does not compute"
        said = f"{self.strategy} {verb} what one device computes"
        lines = [f"{said}, for a batch of {self.examples} examples:"]
        for name in ("loss", "outputs", "gradients", "weights", "metrics", "moving_statistics"):
            title = f"{name.replace('_', ' ')}:"
            lines.append(f"  {title:18} {_line(getattr(self, name))}")
        if self.where:
            lines.append(f"  look at {self.where}")
        if self.draws_differ is not None:
            lines.append(f"  random draws differ: {self.draws_differ}")
        return "\n".join(lines)


def report(model: Any, comparison: Comparison) -> OneDeviceComparison:
    """Returns a comparison as an `OneDeviceComparison`."""
    found = comparison.found
    beyond = tuple(comparison.beyond_rounding)
    return OneDeviceComparison(
        examples=comparison.examples,
        strategy=str(require_trainer(model).strategy),
        loss=next((one for one in found.logs if one.name == "loss"), None),
        outputs=worst(found.outputs),
        gradients=worst(found.gradients),
        weights=worst(found.weights),
        metrics=worst(one for one in found.logs if one.name != "loss"),
        moving_statistics=worst(found.statistics),
        more_than_rounding=beyond,
        where=places(model, comparison) if beyond else "",
        draws_differ=comparison.draws_differ,
    )


def _line(found: Difference | None) -> str:
    if found is None:
        return "none"
    mark = "differ" if found.is_more_than_rounding else "equal"
    if mark == "equal" and found.relative > found.tolerance / 10:
        mark = "nearly equal"
    return f"{mark}, largest difference {found.absolute:.3g} in {found}"


def compare_with_one_device(
    model: Any, x: Any, y: Any = None, sample_weight: Any = None
) -> OneDeviceComparison:
    """Compares a training step of a model under its strategy with the same step on one device.

    Both steps run on copies of the model's state, get the same batch, and draw the same random
    numbers. On TensorFlow, and with PyTorch on GPUs, both steps run without dropout. The model, the
    optimizer and the metrics are not changed, and other threads may use them during the comparison.
    `fit` makes the same comparison with its first batch if your code could mix examples, and warns
    if the steps differ.

    Random numbers are equal in both steps if code draws them by ``keras.random``, or on PyTorch by
    any function of torch. Random numbers of ``tf.random``, NumPy and Python differ. Then a
    difference between the steps counts only if it is far larger than the differences between
    repetitions of the step on one device. On JAX, both steps are compiled programs, so loss,
    metrics and variables are compared, but outputs and gradients are not.

    In a job, all workers must call this function with the same global batch, and all get the same
    report.

    Example::

        with strategy.scope():
            model = Contrastive()
            model.compile("adam", loss=my_loss)
        print(kd.compare_with_one_device(model, x[:64], y[:64]))

    Args:
        model: A compiled model that was made in the scope of a strategy of several devices. If the
            model is not built, this function builds it.
        x: Inputs of one global batch: arrays or tensors of shape ``(N, ...)`` in any structure,
            where N is at least the number of replicas.
        y: Targets in the same form, or None.
        sample_weight: Weights of the examples, or None.

    Returns:
        An `OneDeviceComparison`. If printed, it says what differs, and where to look for the
        reason.

    Raises:
        ScopeError: If the model was made outside of a strategy's scope.
        ValueError: If the model is not compiled, or there are fewer examples than replicas.
        UnsupportedError: If the strategy has one device.
        DisagreementError: If the workers pass different batches.
        ReplicaError: If the step fails on another worker, which raises its own error.
    """
    trainer = trainer_of(model)
    if trainer is None:
        raise ScopeError(
            "Expected a model that was made in a strategy's scope. Received: "
            f"model={model.name!r}, made outside of it. Make it in `with strategy.scope():`."
        )
    if not model.compiled:
        raise ValueError(
            f"Expected a compiled model. Received: model={model.name!r}, not compiled. Call "
            "model.compile(...) first."
        )
    batch = keras_compat.whole_batch(x, y, sample_weight)
    size = rows_of(batch)
    if size < trainer.replicas.num_replicas:
        raise ValueError(
            f"Expected an example for each of the {trainer.replicas.num_replicas} replicas. "
            f"Received: a batch of {size}. Give a larger batch."
        )
    replicas, name = trainer.replicas, "compare_with_one_device"
    facts = worker_agreement.given(replicas, {"x": x, "y": y, "sample_weight": sample_weight})
    with worker_agreement.working(name, replicas, model, facts):
        trainer.prepare_step(batch)
        comparison = compare(model, batch, outputs=True)
        return report(model, comparison)


def places(model: keras.Model, comparison: Comparison) -> str:
    """Returns the user code that may make the step differ, with file and line.

    If only metrics differ, the result names the code of the metrics. If the model's outputs are
    equal, it names the code of the losses and the step. If only changes of weights differ, it names
    the optimizer.
    """
    differ = {one.name for one in comparison.beyond_rounding}
    changes = {f"change of {one.name}" for one in comparison.found.weights}
    if differ <= changes and comparison.found.gradients:
        name = getattr(model.optimizer, "name", "of the step")
        return f"the optimizer {name}, which gets equal gradients, but changes weights differently"
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
    more = f" or {len(found) - _PLACES} more functions" if len(found) > _PLACES else ""
    return " or ".join(found[:_PLACES]) + more


def user_code(model: keras.Model) -> Iterator[Callable[..., Any]]:
    """Yields the functions in a model's training step that may mix examples.

    These are functions that users define, and layers of Keras that may compute along axis 0.
    """
    yield from _steps_of_user(model)
    yield from _metrics_of_user(model)
    yield from _layers_of_user(model)


def _layers_of_user(model: keras.Model) -> Iterator[Callable[..., Any]]:
    for layer in [model, *keras_compat.flat_layers(model)]:
        calls = [defined_by_user(layer, name) for name in ("call", "__call__")]
        yield from _of_user([*calls, getattr(layer, "activation", None)])
        # Other attributes may hold a user's activations, or methods set on this one object.
        yield from filter(callable, filter(keras_compat.is_of_user, vars(layer).values()))
        if isinstance(layer, keras.layers.TorchModuleWrapper):
            yield layer.module
        if isinstance(layer, keras.layers.Lambda):
            yield layer.function
        axes = keras.tree.flatten(getattr(layer, "axis", None))
        if any(isinstance(axis, int) and (axis == 0 or axis < -1) for axis in axes):
            yield type(layer)
    for operation in getattr(model, "operations", ()):
        if not isinstance(operation, keras.layers.Layer):
            yield type(operation)


def _steps_of_user(model: keras.Model) -> Iterator[Callable[..., Any]]:
    for name in ("train_step", "compute_loss"):
        yield from _of_user([defined_by_user(model, name)])
    for name in ("apply", "apply_gradients"):
        optimizer = getattr(model, "optimizer", None)
        yield from _of_user([defined_by_user(optimizer, name)])
    for loss in keras.tree.flatten(model.loss):
        yield from _of_user(_functions_of(loss))


def _adding_losses(model: keras.Model) -> Iterator[Callable[..., Any]]:
    """Yields the call methods of layers whose code contains ``add_loss``."""
    for call in _layers_of_user(model):
        code = getattr(inspect.unwrap(call), "__code__", None)
        if code is not None and "add_loss" in code.co_names:
            yield call


def _metrics_of_user(model: keras.Model) -> Iterator[Callable[..., Any]]:
    yield from _of_user([defined_by_user(model, "compute_metrics")])
    for metric in [*require_trainer(model).given_metrics, *model.metrics]:
        yield from _of_user(_functions_of(metric))


def _functions_of(loss_or_metric: object) -> list[Any]:
    """Returns the functions with which a loss or a metric is computed."""
    if inspect.isclass(loss_or_metric):
        loss_or_metric = loss_or_metric.__new__(loss_or_metric)
    if isinstance(loss_or_metric, keras.losses.Loss):
        calls = [defined_by_user(loss_or_metric, name) for name in ("call", "__call__")]
        return [*calls, vars(loss_or_metric).get("fn")]
    if isinstance(loss_or_metric, keras.metrics.Metric):
        update = defined_by_user(loss_or_metric, "update_state")
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
