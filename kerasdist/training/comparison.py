"""A training step under the strategy, compared with the same step on one device."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import astuple, dataclass, field, replace
from typing import Any

import keras
import numpy as np

from kerasdist import keras_compat
from kerasdist.agreement import behaviour
from kerasdist.backends.trial import Trial, TriedBatch
from kerasdist.training.differences import (
    Difference,
    Differences,
    Precision,
    StepResult,
    beyond,
    differences,
)
from kerasdist.training.draws import Draws
from kerasdist.training.layer_outputs import LayerOutputs
from kerasdist.training.metrics import metrics_of
from kerasdist.training.probe import Calls, Probe, one_trial
from kerasdist.training.trial_workers import TrialWorkers

# By how many roundings the variables are changed to measure the effect of rounding.
_ROUNDINGS = 4
_LARGEST_SCALE = 256.0
# The seed of the draws in a trial.
_SEED = 0
_PLAIN = (bool, int, float, str, type(None), np.ndarray)


@dataclass(frozen=True)
class Taken:
    """The results of one step of a trial.

    Attributes:
        result: What the step computed.
        calls: The outputs of the layers, if they were asked for.
        added: The losses that layers added, by replica.
    """

    result: StepResult
    calls: Calls
    added: dict[Any, list[tuple[Any, Any]]]


@dataclass(frozen=True)
class Comparison:
    """A step on one device and a step of the strategy; equal on all workers.

    Attributes:
        examples: How many examples the batch of both steps has.
        alone: The step on one device.
        found: How the strategy's step differs.
        beyond_rounding: The differences that are not rounding, in the order of a step: the loss and
            the metrics, the gradients, the variables.
        draws_differ: Why random draws cannot be compared, None if they can.
        precision: The size of rounding errors in the model.
        weights: The share of the examples of each replica that has some.
        outputs: How the outputs of layers differ, in the order of the calls, if asked for.
        added: The losses that layers add on each replica that has examples, if asked for.
    """

    examples: int
    alone: Taken
    found: Differences
    beyond_rounding: Sequence[Difference]
    draws_differ: str | None
    precision: Precision
    weights: Sequence[float]
    outputs: Sequence[tuple[Any, Difference]] = ()
    added: Sequence[Sequence[float]] = ()


@dataclass(eq=False)
class _Steps:
    """The steps of one trial."""

    model: Any
    batch: TriedBatch
    trial: Trial
    wants_layers: bool
    draws: Draws = field(init=False)

    def __post_init__(self) -> None:
        self.draws = Draws(self.batch.sizes)

    def alone(self, change: float = 0.0) -> Taken:
        probe = self._probe()
        with probe.recording():
            logs, after = self.trial.alone(self._first_step, self.batch.whole, self._values, change)
        return self._taken(probe, logs, after)

    def divided(self) -> Taken:
        probe = self._probe()
        self._begin()
        with probe.recording():
            logs, after = self.trial.divided(self._step, self.batch.given, self._values)
        return self._taken(probe, logs, after)

    def _step(self, batch: Any) -> Any:
        with self.trial.drawing(self.draws.draw):
            return self.trial.take(batch)

    def _first_step(self, batch: Any) -> Any:
        self._begin()
        return self._step(batch)

    def _begin(self) -> None:
        self.model.reset_metrics()
        optimizer = self.model.optimizer
        if isinstance(optimizer, keras_compat.LossScaleOptimizer) and optimizer.built:
            # With a large scale, one rounding may decide whether gradients are finite.
            scale = optimizer.dynamic_scale
            scale.assign(keras_compat.ops.minimum(scale, _LARGEST_SCALE))

    def _probe(self) -> Probe:
        self.trial.restore()
        return Probe(self.trial, self.draws, self.wants_layers)

    def _values(self) -> dict[str, Any]:
        model = self.model
        hidden = {id(one) for one in keras_compat.seed_states(model)}
        hidden |= {id(one) for metric in metrics_of(model) for one in metric.variables}
        return {
            variable.path: self.trial.as_array(variable.value)
            for variable in model.variables
            if id(variable) not in hidden and keras_compat.stored_value(variable) is not None
        }

    def _taken(self, probe: Probe, logs: Any, after: dict[str, Any]) -> Taken:
        self.trial.restore()
        trained = {variable.path for variable in self.model.trainable_variables}
        before = self._values()
        changes = {
            path: value - before[path] if value.dtype.kind == "f" else value
            for path, value in after.items()
            if path in before
        }
        result = StepResult(
            logs=keras_compat.numbers_of(logs),
            gradients=probe.gradients,
            weights={path: change for path, change in changes.items() if path in trained},
            statistics={path: change for path, change in changes.items() if path not in trained},
            sizes={
                path: float(np.linalg.norm(np.asarray(value, "float64")))
                for path, value in before.items()
            },
        )
        return Taken(result, probe.calls, probe.added)


def compare(model: Any, batch: Any, *, wants_layers: bool, spares: bool = False) -> Comparison:
    """Takes a training step on one device and under the strategy, and restores everything.

    All workers must call it.
    """
    replicas = model.replica_set
    workers = TrialWorkers(replicas.job)
    precision = Precision.of(_compute_dtypes(model), replicas.gradients_travel_as)
    replicas.begin_step()  # variables that are new become equal on all workers
    with _without_traces(model, workers) as trial:
        # All workers compute this step from the rows of all of them.
        with workers.all_do("the first step on one device"):
            steps = _Steps(model, trial.gathered(batch, spares=spares), trial, wants_layers)
            alone = steps.alone()
            steps.draws.end_recording()
            drawn = "" if workers.job is None else steps.draws.digest(trial.as_array)
        drawn_alike = len(set(workers.everyone("random draws of the first step", drawn))) == 1
        if drawn_alike and replicas.job is not None:
            behaviour.require_equal(replicas.job, alone.result.logs, alone.result.gradients)
        with workers.all_do("the first step under the strategy"):
            divided = steps.divided()
            found = differences(alone.result, divided.result, precision)
            suspicious = [one for one in found.deciding if one.is_more_than_rounding]
        if any(workers.everyone("a difference to one device", bool(suspicious))):
            with workers.all_do("the first step on one device, again"):
                # Recorded draws are repeated; generators that were not recorded continue.
                again = steps.alone(change=_ROUNDINGS * precision.epsilon)
                by_chance = differences(alone.result, again.result, precision)
                suspicious = beyond(suspicious, by_chance.deciding)
    misfit = steps.draws.misfit if drawn_alike else "workers draw other random numbers"
    found, suspicious, misfit = _common(workers, found, suspicious, misfit)
    tried = steps.batch
    weights = [one for one in tried.weights if one]
    comparison = Comparison(tried.examples, alone, found, suspicious, misfit, precision, weights)
    if not wants_layers:
        return comparison
    outputs = LayerOutputs(workers, tried.sizes, precision.tolerance)
    return replace(
        comparison,
        outputs=outputs.differences(alone.calls, divided.calls),
        added=[*outputs.added(divided.added).values()],
    )


def _common(
    workers: TrialWorkers, found: Differences, beyond: list[Difference], misfit: str | None
) -> tuple[Differences, list[Difference], str | None]:
    """Returns the findings of the first worker that has some, else those of the chief."""
    if workers.job is None:
        return found, beyond, misfit
    own = [found.as_numbers(), [astuple(one) for one in beyond], misfit]
    everyone = workers.everyone("differences to one device", own)
    numbers, rows, _ = next((one for one in everyone if one[1]), everyone[0])
    misfits = [one[2] for one in everyone if one[2] is not None]
    return (
        Differences.of_numbers(numbers),
        [Difference(*row) for row in rows],
        misfits[0] if misfits else None,
    )


@contextmanager
def _without_traces(model: Any, workers: TrialWorkers) -> Iterator[Trial]:
    layers = [model, *keras_compat.flat_layers(model)]
    seeds = keras_compat.global_seed_generator()
    numbers, numpy_numbers = random.getstate(), np.random.get_state()
    with ExitStack() as stack:
        stack.enter_context(one_trial())
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # the real step warns again
        stack.enter_context(keras_compat.added_losses_kept(layers))
        stack.enter_context(_attributes_kept(layers))
        stack.callback(random.setstate, numbers)
        stack.callback(np.random.set_state, numpy_numbers)
        stack.callback(keras_compat.set_global_seed_generator, seeds)
        trial = model.replica_set.trial(model)
        stack.enter_context(trial)
        if workers.job is not None:
            # Workers draw the same here, whatever they have drawn before.
            random.seed(_SEED)
            np.random.seed(_SEED)
            keras_compat.set_global_seed_generator(None)
            trial.draw_alike()
        known = [*model.variables, *keras_compat.seed_states(model)]
        known += [one for metric in metrics_of(model) for one in metric.variables]
        if model.optimizer is not None:
            known += model.optimizer.variables
        if seeds is not None:
            known.append(seeds.state)
        trial.keep(known)
        yield trial


@contextmanager
def _attributes_kept(layers: Sequence[Any]) -> Iterator[None]:
    """Restores numbers, strings and tensors that a step sets on user-defined layers."""
    own = [layer for layer in layers if not keras_compat.is_builtin(type(layer))]
    before = [dict(vars(layer)) for layer in own]
    try:
        yield
    finally:
        for layer, attributes in zip(own, before, strict=True):
            now = vars(layer)
            for name in [name for name in now if not name.startswith("_")]:
                if now[name] is attributes.get(name) or not _is_plain(now[name]):
                    continue
                if name in attributes:
                    now[name] = attributes[name]
                else:
                    del now[name]


def _is_plain(value: Any) -> bool:
    return isinstance(value, _PLAIN) or keras.ops.is_tensor(value)


def _compute_dtypes(model: Any) -> list[str]:
    return [str(layer.compute_dtype) for layer in [model, *keras_compat.flat_layers(model)]]
