"""A training step under the strategy, compared with the same step on one device.

Each step is taken on copies of the state (`kerasdist.backends.base.trial`), so that nothing has to
be put back, and other threads see nothing of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field, replace
from typing import Any

import keras
import numpy as np

from kerasdist import keras_compat
from kerasdist.agreement import behaviour
from kerasdist.backends.base.trial import Draws, Trial, TriedBatch
from kerasdist.check.differences import (
    Difference,
    Differences,
    Precision,
    StepResult,
    beyond,
    difference,
    differences,
    worst,
)
from kerasdist.check.draws import FreshDraws, RecordedDraws
from kerasdist.check.workers import TrialWorkers
from kerasdist.training.metrics import metrics_of

# By how many roundings the variables are changed to measure the effect of rounding, and how often.
_ROUNDINGS = 4
_REPEATS = 3
_LARGEST_SCALE = 256.0
# The seed of unseeded draws in a trial, equal on all workers.
_SEED = 926_535_897
_PLAIN = (bool, int, float, str, type(None), np.ndarray)


@dataclass(frozen=True)
class Comparison:
    """A step on one device and a step of the strategy; equal on all workers.

    Attributes:
        examples: How many examples the batch of both steps has.
        found: How the strategy's step differs.
        beyond_rounding: The differences that are not rounding, in the order of a step: the loss and
            the metrics, the gradients, the variables.
        draws_differ: Why random draws could not be made equal, None if they could.
    """

    examples: int
    found: Differences
    beyond_rounding: Sequence[Difference]
    draws_differ: str | None


@dataclass(eq=False)
class _Steps:
    """The steps that are compared."""

    model: Any
    batch: TriedBatch
    trials: Any
    wants_outputs: bool
    draws: RecordedDraws = field(init=False)

    def __post_init__(self) -> None:
        self.draws = RecordedDraws(self.batch.sizes)

    def alone(self) -> tuple[StepResult, Trial]:
        return self._taken(self._trial(self.draws, alone=True))

    def replicated(self) -> tuple[StepResult, Trial]:
        return self._taken(self._trial(self.draws, alone=False))

    def changed(self, change: float, number: int) -> StepResult:
        """Takes the step on one device, with weights and unrepeated draws a little different."""
        draws = FreshDraws() if self.draws.misfit else self.draws
        return self._taken(self._trial(draws, alone=True, number=number), change, number)[0]

    def _trial(self, draws: Draws, *, alone: bool, number: int = 0) -> Trial:
        return self.trials.trial(
            draws, alone=alone, outputs=self.wants_outputs, seed=_SEED + number
        )

    def _taken(
        self, trial: Trial, change: float = 0.0, number: int = 0
    ) -> tuple[StepResult, Trial]:
        self.draws.begin()
        state = _state_of(self.model)
        hidden = {id(one) for one in state.seeds} | {id(one) for one in state.metrics}
        seen = [one for one in self.model.variables if id(one) not in hidden]
        with trial.running():
            # In one order on all workers, which may have to gather them.
            keras_compat.stored_values(state.all)
            if change:
                trial.change(change)
            if self.draws.misfit and number:
                for seed in state.seeds:
                    seed.assign(seed + number)
            before = trial.values(seen)
            self._begin()
            logs = keras_compat.numbers_of(trial.take(self.batch))
            after = trial.values(seen)
        return _result(self.model, logs, trial.gradients, before, after), trial

    def _begin(self) -> None:
        self.model.reset_metrics()
        optimizer = self.model.optimizer
        if isinstance(optimizer, keras_compat.LossScaleOptimizer) and optimizer.built:
            # With a large scale, one rounding may decide whether gradients are finite.
            scale = optimizer.dynamic_scale
            scale.assign(keras_compat.ops.minimum(scale, _LARGEST_SCALE))


@dataclass(frozen=True)
class _State:
    """The variables of a step, as far as they are known before it."""

    all: Sequence[Any]
    seeds: Sequence[Any]
    metrics: Sequence[Any]


def _state_of(model: Any) -> _State:
    seeds = [*keras_compat.seed_states(model), keras_compat.global_seed_generator().state]
    metrics = [one for metric in metrics_of(model) for one in metric.variables]
    every = [*model.variables, *seeds, *metrics]
    if model.optimizer is not None:
        every += model.optimizer.variables
    return _State(every, seeds, metrics)


def bytes_of_copies(model: Any) -> int:
    """Returns how many bytes a step's copies of the state and its gradients take on a device."""
    slots = [] if model.optimizer is None else model.optimizer.variables
    return sum(map(_bytes, [*model.variables, *model.trainable_variables, *slots]))


def _bytes(variable: Any) -> int:
    bits = "".join(filter(str.isdigit, str(variable.dtype).partition("_")[0])) or "8"
    return int(np.prod(tuple(variable.shape), dtype="int64")) * int(bits) // 8


def _result(
    model: Any,
    logs: dict[str, Any],
    gradients: dict[str, Any],
    before: dict[str, Any],
    after: dict[str, Any],
) -> StepResult:
    trained = {variable.path for variable in model.trainable_variables}
    changes = {
        path: value - before[path] if value.dtype.kind == "f" else value
        for path, value in after.items()
    }
    return StepResult(
        logs=logs,
        gradients=gradients,
        weights={path: change for path, change in changes.items() if path in trained},
        statistics={path: change for path, change in changes.items() if path not in trained},
        sizes={
            path: float(np.linalg.norm(np.asarray(value, "float64").ravel()))
            for path, value in before.items()
        },
    )


def compare(model: Any, batch: Any, *, outputs: bool, spares: bool = False) -> Comparison:
    """Takes a training step on one device and under the strategy, on copies of the state.

    All workers must call it.

    Args:
        model: A compiled model of the strategy.
        batch: A batch, as the trainer's step takes it.
        outputs: Whether to compare the model's outputs, too.
        spares: Whether some examples of the batch are enough.
    """
    replicas = model.replica_set
    workers = TrialWorkers(replicas.job)
    precision = Precision.of(_compute_dtypes(model), replicas.gradients_travel_as)
    replicas.begin_step()  # variables that are new become equal on all workers
    with _python_state_kept(model):
        with workers.all_do("the first step on one device"):
            trials = replicas.trials(model)
            steps = _Steps(model, trials.gathered(batch, spares=spares), trials, outputs)
            expected, alone = steps.alone()
            steps.draws.end_recording()
            drawn = "" if workers.job is None else steps.draws.digest(alone.as_array)
        job = replicas.job
        drawn_alike = job is None or job.all_have_one("random draws of the first step", drawn)
        if drawn_alike and job is not None:
            # All workers have computed this step from the same rows.
            on_cpus = all(device.kind == "cpu" for device in replicas.devices)
            dtypes = _compute_dtypes(model) if on_cpus else None
            behaviour.require_equal(job, expected.logs, expected.gradients, dtypes)
        with workers.all_do("the first step under the strategy"):
            received, replicated = steps.replicated()
            found = differences(expected, received, precision)
            found = replace(found, outputs=_of_outputs(alone, replicated, steps.batch, precision))
            suspicious = [one for one in found.deciding if one.is_more_than_rounding]
        del alone, replicated  # frees the copies of the state
        if not drawn_alike:
            steps.draws.misfit = "workers draw other random numbers"
        if any(workers.everyone("a difference to one device", bool(suspicious))):
            with workers.all_do("the first step on one device, again"):
                suspicious = _beyond_chance(steps, suspicious, expected, precision)
    found, suspicious, misfit = _common(workers, found, suspicious, steps.draws.misfit)
    return Comparison(steps.batch.examples, found, suspicious, misfit)


def _beyond_chance(
    steps: _Steps, found: Sequence[Difference], expected: StepResult, precision: Precision
) -> list[Difference]:
    """Returns the differences that are larger than what one device's step varies by."""
    left, chance = list(found), []
    for number in range(1, _REPEATS + 1):
        if not left:
            break
        again = steps.changed(_ROUNDINGS * precision.epsilon, number)
        chance += differences(expected, again, precision).deciding
        left = beyond(left, chance, draws_differ=steps.draws.misfit is not None)
    return left


def _of_outputs(
    alone: Trial, replicated: Trial, batch: TriedBatch, precision: Precision
) -> list[Difference]:
    """Returns how the outputs of the model on this worker's replicas differ."""
    found = []
    for key, outputs in replicated.outputs.items():
        if key is None or not batch.sizes[key]:
            continue
        begin = sum(batch.sizes[:key])
        for number, (whole, own) in enumerate(
            zip(alone.outputs.get(None, ()), outputs, strict=False)
        ):
            is_cut = whole.shape != own.shape and whole.shape[:1] == (batch.examples,)
            expected = whole[begin : begin + batch.sizes[key]] if is_cut else whole
            found.append(difference(f"output {number}", expected, own, precision.tolerance))
    largest = worst(found)
    return [] if largest is None else [largest]


def _common(
    workers: TrialWorkers, found: Differences, beyond: list[Difference], misfit: str | None
) -> tuple[Differences, list[Difference], str | None]:
    """Returns the findings of the first worker that has some, else those of the chief."""
    if workers.job is None:
        return found, beyond, misfit
    own = [found.as_numbers(), [astuple(one) for one in beyond], misfit]
    numbers, rows, misfit = workers.chosen("differences to one device", own, _first_finding)
    return Differences.of_numbers(numbers), [Difference(*row) for row in rows], misfit


def _first_finding(everyone: list[list[Any]]) -> list[Any]:
    numbers, rows, _ = next((one for one in everyone if one[1]), everyone[0])
    return [numbers, rows, next((one[2] for one in everyone if one[2] is not None), None)]


@contextmanager
def _python_state_kept(model: Any) -> Iterator[None]:
    """Gives unseeded draws of this thread a generator, and restores what a step sets on layers."""
    layers = [model, *keras_compat.flat_layers(model)]
    seeds = keras_compat.global_seed_generator()
    if seeds is None or model.replica_set.job is not None:
        with model.replica_set.placement():
            keras_compat.set_global_seed_generator(keras.random.SeedGenerator(_SEED))
    try:
        with _attributes_kept(layers):
            yield
    finally:
        keras_compat.set_global_seed_generator(seeds)


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
