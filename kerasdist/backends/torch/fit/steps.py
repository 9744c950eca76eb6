"""Runs the steps of `fit`, `evaluate` and `predict` on the replicas."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from typing import Any, final

import keras
import torch

from kerasdist import config, keras_compat
from kerasdist.backends.base import metering
from kerasdist.backends.torch.fit.batches import Part, divide, join
from kerasdist.backends.torch.fit.fit_rules import FitRules
from kerasdist.backends.torch.replica.compiled import CompiledCalls
from kerasdist.backends.torch.replica.placing import Version
from kerasdist.backends.torch.replica.random import chiefs_draws
from kerasdist.backends.torch.replica.replicas import TorchReplicaSet
from kerasdist.backends.torch.state import shards
from kerasdist.backends.torch.workers.process_group import Group
from kerasdist.backends.torch.workers.reducer import GradientReducer
from kerasdist.core.context import current, whole_step
from kerasdist.core.structures import flatten, map_leaves, pack
from kerasdist.errors import UnsupportedError
from kerasdist.input.sharding import WorkerShard, examples
from kerasdist.training.metrics import metrics_of, prepare

# A step of Keras or the user, which is called with a batch.
Step = Callable[[Any], Any]

# A function that Keras's loops call with a list of batches; each batch is one step.
Function = Callable[[Sequence[Any]], Any]


@final
class Steps:
    """Runs the steps of one model, and divides each global batch over the replicas.

    Every worker runs plain Keras's step on the whole batch in three cases: the batch cannot be
    divided; this model is called inside of another model's step on a replica; or the strategy has
    one replica.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._model = trainer.model
        self._replicas: TorchReplicaSet = trainer.replicas
        self._group = self._replicas.group
        # The rules of a step whose metrics are not yet summed over the workers; None otherwise.
        self._unsummed: FitRules | None = None

    @cached_property
    def _calls(self) -> CompiledCalls:
        return CompiledCalls()

    def run_trial(self, step: Step, batch: Any) -> Any:
        """Runs the step of a `Trial` on the replicas; returns the logs of the global batch."""
        rules, replicas = FitRules(self._model, self._group, _sums_of(self._model)), self._replicas
        parts = divide(
            batch, replicas.num_replicas, replicas.local_replicas, replicas.torch_devices
        )
        assert parts is not None  # the batch has examples
        each = replicas.run(self._trainer.strategy, step, parts, rules)
        return self._logs(each, parts, rules, wanted=True)

    def make_function(self, step: Step, alone: Step, *, trains: bool = False) -> Function:
        """Returns a function that runs a step per batch and returns the logs of the last step.

        The replicas run `step`. If a batch is not divided, every worker runs `alone` instead. With
        `trains`, the function reports the steps to the `Meter` of this `fit`, if there is one. With
        `trains` and several workers, the gradients of Keras's own `train_step` are summed during
        the backward pass.
        """
        model = self._model
        if not self._replicas.is_plain:
            prepare(model, self._trainer.strategy)
        rules = FitRules(model, self._group, _sums_of(model))
        total = self._replicas.gradient_sum
        if trains and total is not None and self._trainer.has_builtin("train_step"):
            rules.reducer = GradientReducer(model, total, rules.sums)
        rules.compiled = self._calls if self._trainer.compiles_in_replicas else None
        reports_itself = not self._trainer.note_overrides()
        may_end_with_update = trains and not reports_itself
        is_worker = self._replicas.job is not None
        with_buffers = layers_with_buffers(model)
        finds_rows = trains and config.most_examples_at_once() == "auto"

        @_hinting()
        def run(batches: Sequence[Any]) -> Any:
            nonlocal may_end_with_update
            for left, given in zip(reversed(range(len(batches))), batches, strict=True):
                if finds_rows:
                    self._trainer.find_rows(given)
                batch, parts = self._divided(given)
                if parts is None:
                    self.end()
                    logs = self._alone(alone, batch, draws_alike=trains and is_worker)
                else:
                    before = _versions(with_buffers) if with_buffers else []
                    each = self._replicas.run(self._trainer.strategy, step, parts, rules)
                    if before:
                        _require_unchanged(before)
                    if may_end_with_update:  # the first step has built the metrics of `compile`
                        rules.ends_with_update = _uses_no_update(model)
                        may_end_with_update = False
                    wanted = self._replicas.batch_logs_matter or reports_itself
                    logs = self._logs(each, parts, rules, wanted=wanted and not left)
            if trains and current.meter is not None:
                current.meter.done(len(batches), sum(map(metering.rows_of, batches)), logs)
            return logs

        return run

    def _logs(
        self, each: Sequence[Any], parts: Sequence[Part], rules: FitRules, *, wanted: bool
    ) -> Any:
        """Returns the logs of the global batch, or an empty dict if no callback needs logs."""
        model = self._model
        if not wanted:
            rules.exchange(sums=False)
            self._unsummed = rules
            return {}
        self._unsummed = None
        if self._trainer.runs_builtin_steps:
            rules.exchange()
            return model.get_metrics_result()
        is_chief = self._group.rank == 0
        return _combined_logs(each, [part.weight for part in parts], rules, is_chief=is_chief)

    def make_predict_function(self, step: Step, alone: Step) -> Function:
        """Returns a function that returns the predictions for all rows, on every worker."""
        model = self._model
        rules = FitRules(model, self._group)
        rules.compiled = self._calls if self._trainer.compiles_in_replicas else None

        def predictions(given: object) -> Any:
            batch, parts = self._divided(given)
            if parts is None:
                return self._alone(alone, batch)
            if not model.built:  # Keras's `predict` builds no model before its first step
                inputs, *_ = keras.utils.unpack_x_y_sample_weight(parts[0].argument)
                self._trainer.ensure_built(inputs)
            own = join(self._replicas.run(self._trainer.strategy, step, parts, rules))
            rules.exchange()
            return of_all(self._group, own, "predict")

        return lambda batches: join([predictions(batch) for batch in batches])

    def _alone(self, step: Step, batch: Any, *, draws_alike: bool = False) -> Any:
        """Runs plain Keras's step on every worker, with the global batch.

        Sharded weights are gathered for the step. With `draws_alike`, all workers draw the same
        random numbers.
        """
        with ExitStack() as contexts:
            if self._replicas.divides_state:
                contexts.enter_context(shards.held_whole(self._model.variables))
            if current.replica is None:
                contexts.enter_context(whole_step(self._trainer.strategy))
                if draws_alike:
                    device = self._replicas.torch_devices[0]
                    contexts.enter_context(chiefs_draws(self._replicas.workers, device))
            return step(batch)

    def end(self) -> bool:
        """Sums metrics over the workers if the last step has not; returns whether it did so."""
        rules, self._unsummed = self._unsummed, None
        if rules is not None:
            rules.exchange()
        return rules is not None

    def _divided(self, batch: Any) -> tuple[Any, list[Part] | None]:
        """Returns a batch, and its local batches or None if the batch is not divided."""
        replicas = self._replicas
        if isinstance(batch, WorkerShard) and not batch.least:
            # A worker has no rows of this batch. So all rows are gathered, and are then divided
            # evenly over the workers.
            batch = of_all(self._group, batch.rows, "divide a batch")
        if replicas.is_plain or current.replica is not None:
            return batch, None
        replicas.begin_step()
        if replicas.job is not None:
            replicas.first_batches.compare()
            total = batch.total if isinstance(batch, WorkerShard) else examples(batch)
            replicas.first_batches.history.add(total)
        devices = replicas.torch_devices
        return batch, divide(batch, replicas.num_replicas, replicas.local_replicas, devices)


def layers_with_buffers(model: Any) -> list[Any]:
    """Returns those of a model and its layers that have registered torch buffers themselves."""
    layers = [model, *keras_compat.flat_layers(model)]
    # Wrappers are left out, because each replica has its own copies of the buffers of a wrapped
    # module.
    wrapper = keras.layers.TorchModuleWrapper
    return [
        one
        for one in layers
        if next(one.named_buffers(recurse=False), None) and not isinstance(one, wrapper)
    ]


def buffers_of(layer: Any) -> dict[str, torch.Tensor]:
    """Returns the buffers that a layer itself has registered, by their names."""
    return dict(layer.named_buffers(recurse=False, remove_duplicate=False))


def _versions(layers: Sequence[Any]) -> list[tuple[Any, str, Version]]:
    """Returns, for each buffer of these layers, the layer, the buffer's name and its `Version`."""
    found = [(layer, buffers_of(layer)) for layer in layers]
    return [(layer, name, Version(one)) for layer, own in found for name, one in own.items()]


def _require_unchanged(before: Sequence[tuple[Any, str, Version]]) -> None:
    """Refuses a step that changes a buffer of a Keras layer, which all replicas share."""
    for layer, name, version in before:
        if not version.is_of(getattr(layer, name)):
            raise UnsupportedError(
                "Expected a step to change Keras variables alone, of which each replica has its "
                f"own. Received: a change of the buffer '{layer.name}.{name}', which all replicas "
                "share. Make the buffer a weight, by self.add_weight(trainable=False), or put the "
                "module that has the buffer into keras.layers.TorchModuleWrapper."
            )


@contextmanager
def _hinting() -> Generator[None]:
    """Adds advice to an out-of-memory error."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        if config.most_examples_at_once() != "auto":
            error.add_note(
                'kerasdist.config.set_most_examples_at_once("auto"), before the first step, has '
                "each replica compute as many examples at a time as it has memory for, with the "
                "same numbers."
            )
        raise


def of_all(group: Group, own: object, purpose: str) -> Any:
    """Returns the rows of all workers, one after another. All workers must call this function."""
    if group.size == 1:
        return own
    present = [leaf for leaf in flatten(own) if leaf is not None]
    if not present:
        return own
    tensors = [keras_compat.ops.convert_to_tensor(leaf) for leaf in present]
    gathered = iter(group.gather(purpose, tensors, 0))
    return map_leaves(lambda leaf: None if leaf is None else next(gathered)[0], own)


def _combined_logs(
    logs: Sequence[Any], weights: Sequence[float], rules: FitRules, *, is_chief: bool
) -> Any:
    """Returns the logs of the global batch: for floats the weighted mean over all replicas.

    For other types, the log of the chief's first replica is returned.
    """
    leaves: list[Any] = []
    own: list[torch.Tensor] = []
    for column in zip(*map(flatten, logs), strict=True):
        if column[0] is None or isinstance(column[0], str):
            leaves.append(column[0])
            continue
        first, *others = [keras_compat.ops.convert_to_tensor(leaf).detach() for leaf in column]
        leaves.append(first)
        is_mean = first.is_floating_point()
        total = first.double().reshape(-1) * (weights[0] if is_mean else float(is_chief))
        for other, weight in zip(others, weights[1:], strict=True):
            if is_mean:
                total = total + other.to(first.device).double().reshape(-1) * weight
        own.append(total)
    totals = rules.exchange([torch.cat(own)] if own else [])
    values = iter(totals[0].split([len(one) for one in own]) if totals else ())
    found = [
        next(values).view(leaf.shape).to(leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf
        for leaf in leaves
    ]
    return pack(logs[0], found)


def _uses_no_update(model: keras.Model) -> bool:
    """Returns whether only Keras's own code runs after a step's update: that of the metrics."""
    return keras_compat.applies_directly(model.optimizer) and all(
        keras_compat.is_builtin(type(one)) and type(one) is not keras.metrics.MeanMetricWrapper
        for one in metrics_of(model)
    )


def _sums_of(model: keras.Model) -> Iterator[keras.Variable]:
    for metric in metrics_of(model):
        yield from (one for one in metric.variables if one.aggregation == "sum")
