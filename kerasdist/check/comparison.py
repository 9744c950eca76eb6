"""Compares a training step under the strategy with the same step on one device.

Each step runs on copies of the state (`kerasdist.backends.base.trial`), so the variables need not
be restored, and other threads do not notice the steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field
from typing import Any, NamedTuple

import keras
import numpy as np

from kerasdist import keras_compat
from kerasdist.agreement import results
from kerasdist.backends.base import random_states
from kerasdist.backends.base.model_trainer import TrainerLike, require_trainer
from kerasdist.backends.base.trial import Draws, Trial, TriedBatch
from kerasdist.backends.base.user_places import may_draw, state_kept
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
from kerasdist.core.context import ReplicaLike, enclosing_replica
from kerasdist.errors import ReplicaError
from kerasdist.job.comparison import digest
from kerasdist.job.job import Job, all_do, everyone
from kerasdist.keras_compat import ops
from kerasdist.training.metrics import metrics_of

# The effect of rounding on a step is measured `_REPEATS` times. Each time, the weights are first
# changed by up to `_ROUNDINGS` rounding errors.
_ROUNDINGS = 4
_REPEATS = 3
_LARGEST_SCALE = 256.0
# The seed, equal on all workers, of random draws that have no seed of their own.
_SEED = 926_535_897
# The label under which workers exchange whether they have found differences.
_FOUND = "a difference to one device"


@dataclass(frozen=True)
class Comparison:
    """The comparison of a step on one device with a step of the strategy.

    All workers get the same comparison.

    Attributes:
        examples: How many examples the batch of both steps has.
        found: All differences between the two steps.
        beyond_rounding: The differences that rounding does not explain, in the order of a step: the
            loss and the metrics, the gradients, the variables.
        draws_differ: Why the two steps could not get equal random numbers; None if they got them.
        keeps_state: Whether a repetition of the step on one device gives another result, although
            the step draws no random numbers. The reason is code that keeps state in Python.
    """

    examples: int
    found: Differences
    beyond_rounding: Sequence[Difference]
    draws_differ: str | None
    keeps_state: bool


@dataclass(eq=False)
class _Steps:
    """The steps that are compared, on one device and on the replicas.

    Attributes:
        expected: The result of the first step on one device.
    """

    trainer: TrainerLike
    batch: TriedBatch
    wants_outputs: bool
    precision: Precision
    draws: RecordedDraws
    expected: StepResult = field(init=False)

    @property
    def model(self) -> Any:
        """The model that the steps train."""
        return self.trainer.model

    def take_step(self, *, alone: bool, change: float = 0.0, number: int = 0) -> StepResult:
        """Runs the step on one device (`alone`) or on the replicas; returns its results.

        `change` is the largest relative change of the weights before the step. If recorded random
        numbers cannot be repeated, new ones are drawn from a seed that depends on `number`.
        """
        model, is_fresh = self.model, self.draws.misfit is not None and number > 0
        draws = RecordedDraws(self.batch.sizes) if is_fresh else self.draws
        trial: Trial = self.trainer.trial_class(
            self.trainer, draws, alone=alone, outputs=self.wants_outputs, seed=_SEED + number
        )
        self.draws.begin()
        seeds = [*keras_compat.seed_states(model), keras_compat.global_seed_generator().state]
        metrics = [one for metric in metrics_of(model) for one in metric.variables]
        hidden = set(map(id, [*seeds, *metrics]))
        seen = [one for one in model.variables if id(one) not in hidden]
        with keras_compat.in_trial(trial):  # the step uses copies of the variables
            # All workers read all variables in the same order, because a read may be a collective
            # that gathers shards.
            keras_compat.stored_values([*model.variables, *seeds, *metrics, *_slots_of(model)])
            if change:
                trial.change(change)
            for seed in seeds if is_fresh else ():
                seed.assign(seed + number)
            before = trial.values(seen)
            with trial.own_state_kept(), state_kept(model):
                self._begin()
                logs = keras_compat.numbers_of(trial.take(self.batch))
            after = trial.values(seen)
        trial.free_copies()
        trained = {variable.path for variable in model.trainable_variables}
        changes = {
            path: value - before[path] if value.dtype.kind == "f" else value
            for path, value in after.items()
        }
        return StepResult(
            logs=logs,
            gradients=trial.gradients,
            weights={path: change for path, change in changes.items() if path in trained},
            statistics={path: change for path, change in changes.items() if path not in trained},
            sizes={
                path: float(np.linalg.norm(np.asarray(value, "float64").ravel()))
                for path, value in before.items()
            },
            outputs=trial.outputs,
        )

    def _begin(self) -> None:
        self.model.reset_metrics()
        optimizer = self.model.optimizer
        if isinstance(optimizer, keras_compat.LossScaleOptimizer) and optimizer.built:
            # With a large loss scale, a rounding error may decide whether gradients overflow. So
            # the scale is limited here.
            scale = optimizer.dynamic_scale
            scale.assign(keras_compat.ops.minimum(scale, _LARGEST_SCALE))

    def compare_replicas(self, job: Job | None) -> tuple[Differences, list[Difference]]:
        """Runs the step on the replicas and compares it with the step on one device.

        Returns all differences, and a list of those that are larger than rounding.
        """
        with all_do(job, "the first step under the strategy", ReplicaError):
            received = self.take_step(alone=False)
            found = differences(self.expected, received, self.precision)
            found = found._replace(outputs=self._of_outputs(received.outputs))
        return found, [one for one in found.deciding if one.is_more_than_rounding]

    def _of_outputs(self, replicated: Mapping[int | None, Sequence[Any]]) -> list[Difference]:
        """Returns the largest difference of outputs between this process's replicas and one device.

        The result is a list with one difference, or an empty list if there is nothing to compare.
        """
        found, batch, alone = [], self.batch, self.expected.outputs.get(None, ())
        for key, outputs in replicated.items():
            if key is None or not batch.sizes[key]:
                continue
            begin = sum(batch.sizes[:key])
            for number, (whole, own) in enumerate(zip(alone, outputs, strict=False)):
                is_cut = whole.shape != own.shape and whole.shape[:1] == (batch.examples,)
                expected = whole[begin : begin + batch.sizes[key]] if is_cut else whole
                name = f"output {number}"
                found.append(difference(name, expected, own, self.precision.tolerance))
        largest = worst(found)
        return [] if largest is None else [largest]

    def keep_state(self) -> bool:
        """Returns whether the step, repeated on one device, gives another result.

        If the step draws random numbers, the method returns False. Otherwise, another result means
        that the step keeps state in Python. The replicas of a process share this state, which
        explains why their results differ from those of one device. In a job this method is not
        called, because workers with one replica each share no such state.
        """
        if may_draw(self.model):
            return False
        before = random_states.kept()
        again = self.take_step(alone=True)
        if self.draws.misfit is not None or before != random_states.kept():
            return False
        repeated = differences(self.expected, again, self.precision).deciding
        return any(one.is_more_than_rounding for one in repeated)

    def beyond_chance(self, found: Sequence[Difference]) -> list[Difference]:
        """Returns those differences in `found` that repetitions on one device do not explain.

        The step is repeated on one device, each time with slightly changed weights. A difference in
        `found` must be far larger than the differences between these repetitions.
        """
        left, chance = list(found), []
        change = _ROUNDINGS * self.precision.epsilon
        for number in range(1, _REPEATS + 1):
            if not left:
                break
            again = self.take_step(alone=True, change=change, number=number)
            chance += differences(self.expected, again, self.precision).deciding
            left = beyond(left, chance, draws_differ=self.draws.misfit is not None)
        return left


def _slots_of(model: Any) -> Sequence[Any]:
    return () if model.optimizer is None else model.optimizer.variables


def bytes_of_copies(model: keras.Model) -> int:
    """Returns how many bytes a step's copies of the state, and its gradients, take on a device."""
    copied = [*model.variables, *model.trainable_variables, *_slots_of(model)]
    return sum(map(keras_compat.nbytes, copied))


def compare(model: Any, batch: Any, *, outputs: bool, spares: bool = False) -> Comparison:
    """Runs a training step on one device and under the strategy, on copies of the state.

    All workers must call this function.

    Args:
        model: A compiled model of the strategy.
        batch: A batch, in the form in which the trainer's steps take it.
        outputs: Whether to compare the model's outputs too.
        spares: Whether to use only as many examples of the batch as the comparison needs.
    """
    trainer = require_trainer(model)
    replicas = trainer.replicas
    job = replicas.job
    precision = Precision.of(_compute_dtypes(model), replicas.gradients_travel_as)
    replicas.begin_step()  # gives new variables the chief's values
    with seeds_kept(model):
        with all_do(job, "the first step on one device", ReplicaError):
            tried = trainer.trial_class.gathered(replicas, batch, spares=spares)
            steps = _Steps(trainer, tried, outputs, precision, RecordedDraws(tried.sizes))
            expected = steps.expected = steps.take_step(alone=True)
            steps.draws.end_recording()
            drawn = "" if job is None else steps.draws.digest(trainer.trial_class.as_array)
        drawn_alike = job is None or job.all_have_one("random draws of the first step", drawn)
        if drawn_alike and job is not None:
            # All workers have computed this step from the same rows and random numbers, so their
            # results must be equal.
            dtypes = _compute_dtypes(model) if replicas.on_cpu else None
            results.require_equal_results(job, expected.logs, expected.gradients, dtypes)
        found, suspicious = steps.compare_replicas(job)
        is_any = any(everyone(job, _FOUND, bool(suspicious)))
        if is_any and any(everyone(job, _FOUND, steps.draws.may_be_stacked)):
            steps.draws.are_stacked = True
            again = steps.compare_replicas(job)
            found, suspicious = min((found, suspicious), again, key=lambda one: len(one[1]))
            is_any = any(everyone(job, _FOUND, bool(suspicious)))
        if not drawn_alike:
            steps.draws.misfit = "workers draw other random numbers"
        keeps_state = False
        if is_any:
            with all_do(job, "the first step on one device, again", ReplicaError):
                keeps_state = job is None and steps.keep_state()
                if not keeps_state:
                    suspicious = steps.beyond_chance(suspicious)
    found, suspicious, misfit = _common(job, found, suspicious, steps.draws.misfit)
    return Comparison(steps.batch.examples, found, suspicious, misfit, keeps_state)


def _common(
    job: Job | None, found: Differences, beyond: list[Difference], misfit: str | None
) -> tuple[Differences, list[Difference], str | None]:
    """Returns the results of the first worker that has found a difference beyond rounding.

    If no worker has found such a difference, the chief's results are returned. All workers must
    call this function.
    """
    if job is None:
        return found, beyond, misfit
    own = [[list(map(astuple, kind)) for kind in (*found, beyond)], misfit]
    rows, misfit = job.choose("differences to one device", own, _first_finding)
    *kinds, beyond = [[Difference(*row) for row in kind] for kind in rows]
    return Differences(*kinds), beyond, misfit


def _first_finding(everyone: list[list[Any]]) -> list[Any]:
    rows = next((rows for rows, _ in everyone if rows[-1]), everyone[0][0])
    return [rows, next((misfit for _, misfit in everyone if misfit is not None), None)]


@contextmanager
def seeds_kept(model: Any) -> Iterator[None]:
    """In this context, random draws without a seed are equal on all workers of a job.

    In a job, these draws use a new global seed generator of Keras, which starts from `_SEED`.
    Without a job, the context makes a new generator only if the thread has none. After the context,
    the thread has its former generator again.
    """
    seeds = keras_compat.global_seed_generator()
    replicas = require_trainer(model).replicas
    if seeds is None or replicas.job is not None:
        with replicas.placement():
            keras_compat.set_global_seed_generator(keras.random.SeedGenerator(_SEED))
    try:
        yield
    finally:
        keras_compat.set_global_seed_generator(seeds)


def _compute_dtypes(model: keras.Model) -> list[str]:
    return [str(layer.compute_dtype) for layer in [model, *keras_compat.flat_layers(model)]]


# Random functions that drop, scale or reorder values. In the compared steps, these functions return
# their input unchanged.
_LEFT_OUT = ("dropout", "shuffle")


class _Recorded(NamedTuple):
    name: str
    tensor: Any


class RecordedDraws(Draws):
    """Records the random numbers of the step on one device, and repeats them in later steps.

    Attributes:
        misfit: Why a recorded draw could not be repeated, so that the step used new random numbers;
            None if all draws were repeated.
        may_be_stacked: Whether an axis of a recorded draw has several entries for each row of the
            batch, so that it is unclear which entries belong to a row.
        are_stacked: Whether the entries of such an axis are taken to be several batches, one after
            the other. Otherwise the entries of each row are taken to be neighbours.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = tuple(sizes)
        self._recorded: list[_Recorded] = []
        self._is_recorded = False
        self._position: dict[Any, int] = {}
        self.misfit: str | None = None
        self.may_be_stacked = self.are_stacked = False

    def begin(self) -> None:
        """Begins a step, which repeats the recorded draws in order, beginning with the first."""
        self._position.clear()

    def end_recording(self) -> None:
        """Ends the recording. Later steps repeat the recorded draws."""
        self._is_recorded = True

    def digest(self, as_array: Callable[[Any], Any]) -> str:
        """Returns a digest of all recorded draws."""
        arrays = [as_array(drawn) for _, drawn in self._recorded]
        facts = [[str(one.dtype), one.shape, results.checksum_of(one)] for one in arrays]
        return digest(facts)

    def draw(self, name: str, draw: Callable[[], Any], given: Any) -> Any:
        """Returns the result of the random function `name`, or a recorded result in its place.

        The functions for dropout and shuffling are not run: their input, `given`, is returned.
        """
        if name in _LEFT_OUT:
            return given
        drawn = draw()
        if not keras.ops.is_tensor(drawn):
            return drawn
        if not self._is_recorded:
            self._recorded.append(_Recorded(name, keras.ops.stop_gradient(drawn)))
            return drawn
        return self._repeated(name, drawn)

    def _repeated(self, name: str, drawn: Any) -> Any:
        replica = enclosing_replica()
        key = None if replica is None else int(replica.replica_id_in_sync_group)
        if key is not None and not self._sizes[key]:
            return drawn  # a replica without rows computes a stand-in row, which has no effect
        shape = tuple(drawn.shape)
        # Code may draw more often on replicas, or in another order. So the next recorded draw that
        # fits is taken.
        for position in range(self._position.get(key, 0), len(self._recorded)):
            if self._recorded[position].name == name:
                own = self._own_rows(self._recorded[position].tensor, shape, replica)
                if own is not None:
                    self._position[key] = position + 1
                    return ops.cast(own, drawn.dtype)
        self.misfit = f"{name} draws shape {shape} on a replica; one device drew nothing that fits"
        return drawn

    def _own_rows(self, recorded: Any, shape: tuple[int, ...], replica: ReplicaLike | None) -> Any:
        """Returns a replica's rows of a recorded draw; None if the shapes do not fit."""
        whole = tuple(recorded.shape)
        if whole == shape:
            return recorded
        if replica is None or len(whole) != len(shape):
            return None
        number, total = int(replica.replica_id_in_sync_group), sum(self._sizes)
        pairs = enumerate(zip(whole, shape, strict=True))
        axes = [axis for axis, (there, here) in pairs if there != here]
        if len(axes) != 1 or not total:
            return None
        [axis] = axes
        times, rest = divmod(whole[axis], total)
        if rest or shape[axis] != self._sizes[number] * times:
            return None
        self.may_be_stacked |= times > 1
        each, blocks = (1, times) if self.are_stacked else (times, 1)
        begin, size = sum(self._sizes[:number]) * each, self._sizes[number] * each
        parts = [slice(at + begin, at + begin + size) for at in range(0, total * blocks, total)]
        return ops.concatenate([recorded[(*[slice(None)] * axis, one)] for one in parts], axis)
