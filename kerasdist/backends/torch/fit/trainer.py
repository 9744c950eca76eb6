"""The trainer of models made under a strategy on PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, final

import keras
import torch

from kerasdist import config, keras_compat
from kerasdist.backends.base.metering import rows_of
from kerasdist.backends.torch.fit import passes
from kerasdist.backends.torch.fit.batches import Part, divide, join
from kerasdist.backends.torch.fit.fit_rules import FitRules
from kerasdist.backends.torch.fit.steps import (
    hinting,
    layers_with_buffers,
    of_all,
    require_unchanged,
    sums_of,
    uses_no_update,
    versions_of,
)
from kerasdist.backends.torch.replica import modules
from kerasdist.backends.torch.replica.collectives import collectives_here
from kerasdist.backends.torch.replica.compiled import CompiledCalls
from kerasdist.backends.torch.replica.placing import add_up
from kerasdist.backends.torch.replica.random import chiefs_draws
from kerasdist.backends.torch.replica.replicas import TorchReplicaSet
from kerasdist.backends.torch.state import shards
from kerasdist.backends.torch.state.variables import ReplicaScope
from kerasdist.backends.torch.workers.reducer import GradientReducer
from kerasdist.check import memory
from kerasdist.check.first_batch import FirstBatchCheck, may_differ
from kerasdist.core.context import current, whole_step
from kerasdist.core.user_warnings import warn_user
from kerasdist.input.sharding import WorkerShard, examples
from kerasdist.training.metrics import prepare
from kerasdist.training.numerics import mean_over_rows
from kerasdist.training.passes import most_rows, refused
from kerasdist.training.trainer import Original, ReplicatedTrainer

# A step of Keras or the user, which is called with a batch.
Step = Callable[[Any], Any]

# A function that Keras's loops call with a list of batches; each batch is one step.
Function = Callable[[Sequence[Any]], Any]

_UNCOMPILED = (
    "jit_compile=True has no effect here on PyTorch: the model runs uncompiled, and its numbers "
    "are the same. "
)
_IN_THREADS = (
    "torch.compile cannot follow replicas in threads, each with its own view of the variables. "
    "A process per device compiles: `kerasdist run --workers gpu script.py`."
)
_GATHERS = (
    'With sharding="full" weights are gathered while the model runs, and with a LayoutMap the '
    'model runs by DTensor: torch.compile supports neither here. sharding="optimizer" compiles.'
)


@final
class TorchTrainer(ReplicatedTrainer):
    """Makes the functions that Keras's own loops call, so that a model's steps run on replicas.

    Every worker runs plain Keras's step on the whole batch in three cases: the batch cannot be
    divided; this model is called inside of another model's step on a replica; or the strategy has
    one replica.
    """

    HOOKED = (*ReplicatedTrainer.HOOKED, "__call__", "zero_grad", "end_epoch")

    # The rules of the last step if its metrics are not yet summed over the workers, else None.
    _unsummed: FitRules | None = None

    if TYPE_CHECKING:
        replicas: TorchReplicaSet

    def __call__(self, original: Original, *args: object, **kwargs: object) -> Any:
        """Calls the model, in several passes if there are more examples than one call may have."""
        most = most_rows(self)
        if most is None or not torch.is_grad_enabled():
            return self._call_at_once(original, *args, **kwargs)
        call = partial(self._call_at_once, original)
        return passes.calls(self.model, call, args, kwargs, most)

    def _call_at_once(self, original: Original, *args: object, **kwargs: object) -> Any:
        """Calls the model once. In a job with ``jit_compile=True``, the call is compiled."""
        scope, trial = keras_compat.get_stateless_scope(), current.trial
        compiled = scope.rules.compiled if isinstance(scope, ReplicaScope) else None
        collectives = collectives_here() if compiled else None
        if compiled and collectives and trial is None:
            return compiled(collectives, self.model, original, args, kwargs)
        weights = scope.weights if isinstance(scope, ReplicaScope) else None
        if weights is not None and not keras_compat.is_in_layer():
            outputs = weights.plain(original(*weights.joint(args), **weights.joint(kwargs)))
        else:
            outputs = original(*args, **kwargs)
        if trial is not None:
            trial.record_outputs(self.model, outputs)
        return outputs

    def zero_grad(self, original: Original, set_to_none: bool = True) -> None:
        """Clears the current replica's gradients; outside of replicas, calls torch's method."""
        scope = modules.scope_here()
        if scope is None:
            original(set_to_none)
        else:
            scope.clear_gradients(self.model.trainable_variables)

    def new_function(self, step: str, original: Original) -> Function:
        """Returns a function that runs a step per batch.

        A function of `fit` or `evaluate` returns the logs of the last step, a function of `predict`
        all predictions, concatenated. A function of `fit` also reports its steps to the `Meter` of
        this `fit`, if there is one. With several workers, the gradients of Keras's own `train_step`
        are summed during the backward pass.
        """
        model, replicas, trains = self.model, self.replicas, step == "train_step"
        if trains and replicas.num_replicas > 1 and not replicas.on_cpu:
            # By hooks in these parts of Keras, code that runs in torch's backward threads finds its
            # replica (see `fit/backward.py`).
            keras_compat.internals.REMAT.require()
            keras_compat.internals.CUSTOM_GRADIENT.require()

        def own(batch: object) -> Any:
            return getattr(model, step)(batch)

        own = own if trains else torch.no_grad()(own)
        alone = self._as_plain_keras(own)
        predicts = step == "predict_step"
        if not replicas.is_plain and not predicts:
            prepare(model, self.strategy)
        rules = FitRules(model, replicas.group, () if predicts else sums_of(model))
        rules.compiled = self._calls if self._compiles_in_replicas else None
        if predicts:
            return lambda batches: join([self._predict(own, alone, rules, one) for one in batches])
        if trains and replicas.gradient_sum is not None and self.has_builtin("train_step"):
            rules.reducer = GradientReducer(model, replicas.gradient_sum, rules.sums)
        reports_itself = not self.note_overrides()
        if trains:
            rules.ends_with_update = not reports_itself and uses_no_update(model)
            kinds = map(type, keras_compat.flat_layers(model))
            rules.takes_turns = not rules.ends_with_update or (
                self.strategy.options.batch_norm != "per_replica"
                and keras.layers.BatchNormalization in kinds
            )
        is_worker = replicas.job is not None
        with_buffers = layers_with_buffers(model)
        finds_rows = trains and config.most_examples_at_once() == "auto"

        @hinting()
        def run(batches: Sequence[Any]) -> Any:
            for left, given in zip(reversed(range(len(batches))), batches, strict=True):
                if finds_rows:
                    self._find_rows(given)
                batch, parts = self._divided(given)
                if parts is None:
                    self._sum_metrics()
                    logs = self._run_alone(alone, batch, draws_alike=trains and is_worker)
                else:
                    before = versions_of(with_buffers) if with_buffers else []
                    each = replicas.run(self.strategy, own, parts, rules)
                    if before:
                        require_unchanged(before)
                    wanted = replicas.batch_logs_matter or reports_itself
                    logs = self._logs(each, parts, rules, wanted=wanted and not left)
            if trains and current.meter is not None:
                current.meter.done(len(batches), sum(map(rows_of, batches)), logs)
            return logs

        return self._checked(run) if trains and may_differ(model) else run

    @cached_property
    def _calls(self) -> CompiledCalls:
        return CompiledCalls()

    @property
    def trial_class(self) -> type[Any]:
        """The class of `Trial` that compares a step on these devices with one device's step."""
        if self.replicas.is_plain:
            return super().trial_class
        # imported here, because few programs need this module
        from kerasdist.backends.torch.fit.trial import TorchTrial

        return TorchTrial

    def step_on_replicas(self, step: Step, batch: Any) -> Any:
        """Runs the step of a `Trial` on the replicas; returns the logs of the global batch."""
        rules = FitRules(self.model, self.replicas.group, sums_of(self.model))
        parts = divide(batch, self.replicas)
        assert parts is not None  # the batch has examples
        each = self.replicas.run(self.strategy, step, parts, rules)
        return self._logs(each, parts, rules, wanted=True)

    def _logs(
        self, each: Sequence[Any], parts: Sequence[Part], rules: FitRules, *, wanted: bool
    ) -> Any:
        """Returns the logs of the global batch, or an empty dict if no callback needs logs."""
        if not wanted:
            rules.exchange(sums=False)
            self._unsummed = rules
            return {}
        self._unsummed = None
        if self.runs_builtin_steps:
            rules.exchange()
            return self.model.get_metrics_result()
        weights, numbers = [part.weight for part in parts], self.replicas.local_replicas
        return mean_over_rows(each, weights, numbers, partial(_sums, rules))

    def _predict(self, step: Step, alone: Step, rules: FitRules, given: Any) -> Any:
        """Returns the predictions for all rows of a batch, on every worker."""
        batch, parts = self._divided(given)
        if parts is None:
            return self._run_alone(alone, batch)
        if not self.model.built:  # Keras's `predict` builds no model before its first step
            inputs, *_ = keras_compat.unpack_x_y_sample_weight(parts[0].argument)
            self.ensure_built(inputs)
        own = join(self.replicas.run(self.strategy, step, parts, rules))
        rules.exchange()
        return of_all(self.replicas.group, own, "predict")

    def _run_alone(self, step: Step, batch: Any, *, draws_alike: bool = False) -> Any:
        """Runs plain Keras's step on every worker, with the global batch.

        Sharded weights are gathered for the step. With `draws_alike`, all workers draw the same
        random numbers.
        """
        replicas = self.replicas
        with ExitStack() as contexts:
            if replicas.divides_state:
                contexts.enter_context(shards.held_whole(self.model.variables))
            if current.replica is None:
                contexts.enter_context(whole_step(self.strategy))
                if draws_alike:
                    device = replicas.torch_devices[0]
                    contexts.enter_context(chiefs_draws(replicas.workers, device))
            return step(batch)

    def _sum_metrics(self) -> bool:
        """Sums metrics over the workers, unless the last step has summed them.

        Returns whether this call has summed them.
        """
        rules, self._unsummed = self._unsummed, None
        if rules is not None:
            rules.exchange()
        return rules is not None

    def _divided(self, batch: Any) -> tuple[Any, list[Part] | None]:
        """Returns a batch and its local batches, which are None if the batch is not divided."""
        replicas = self.replicas
        if isinstance(batch, WorkerShard) and not batch.least:
            # At least one worker has no rows of this batch. So all rows are gathered, and are then
            # divided evenly over the workers.
            batch = of_all(replicas.group, batch.rows, "divide a batch")
        if replicas.is_plain or current.replica is not None:
            return batch, None
        replicas.begin_step()
        if replicas.job is not None:
            replicas.first_batches.compare()
            total = batch.total if isinstance(batch, WorkerShard) else examples(batch)
            replicas.first_batches.history.add(total)
        return batch, divide(batch, replicas)

    def _checked(self, function: Function) -> Function:
        """Wraps a train function so that its first step is compared with the step on one device."""
        check = FirstBatchCheck(self.model)

        def checked(batches: Any) -> Any:
            for batch in batches:
                check.look(batch, rows_of(batch))
            if check.is_done:
                self.model.train_function = function
            return function(batches)

        return checked

    def build_symbolically(
        self, original: Original, iterator: Any = None, data_batch: Any = None
    ) -> None:
        """Builds unbuilt layers. Keras does not know `WorkerShard`, so it gets the shard's rows."""
        seen = None if iterator is None else _rows_alone(iterator)
        super().build_symbolically(original, seen, data_batch)

    def require_passes(self) -> None:
        """Refuses a model that is known not to support calls in several passes."""
        if self._gathers_weights:
            raise refused(
                'weights that are sharded (sharding="full"), which each pass would gather, or that '
                "a LayoutMap divides"
            )
        # `jit_compile` is read directly, because torch's compiler cannot trace
        # `uses_torch_compile`.
        if self.model.jit_compile:
            raise refused("jit_compile=True")
        super().require_passes()

    def _find_rows(self, batch: Any) -> None:
        """Finds how many rows of a batch a replica has enough memory to compute at once.

        All workers must call this method.
        """
        replicas, examples = self.replicas, rows_of(batch)
        is_own = isinstance(batch, WorkerShard)
        rows = batch.size if is_own else -(-examples // replicas.num_replicas)
        memory.find(self, examples, rows, partial(self._try_step, batch))

    def _try_step(self, batch: Any) -> None:
        """Computes the gradients of the first replica's rows, to see if the memory suffices."""
        # imported here, because few programs need this module
        from kerasdist.backends.torch.fit.trial import TorchMemoryTrial

        replicas = self.replicas
        parts = None if replicas.is_plain else divide(batch, replicas)
        with replicas.placement():
            rows = batch if parts is None else parts[0].argument
            memory.try_step(self, TorchMemoryTrial, rows)

    def _as_plain_keras(self, step: Step) -> Step:
        if not keras_compat.uses_torch_compile(self.model):
            return step
        if self.replicas.is_plain:
            return torch.compile(step)
        if not self._compiles_in_replicas:
            warn_user(_UNCOMPILED + (_GATHERS if self._gathers_weights else _IN_THREADS))
        return step

    @property
    def _compiles_in_replicas(self) -> bool:
        """Whether calls of the model in a replica's step are compiled."""
        # Compiled code reads the variables themselves, not the copies that several replicas of a
        # process read. So a replica runs compiled code only if it is alone in its process, as in a
        # job.
        can_compile = self.replicas.job is not None and not self._gathers_weights
        return can_compile and keras_compat.uses_torch_compile(self.model)

    @property
    def _gathers_weights(self) -> bool:
        rules = self.replicas.shard_rules
        return rules is not None and rules.shards_weights

    def end_epoch(self, original: Original, logs: Any) -> Any:
        """Returns the logs of an epoch; may wait for the device, as plain Keras does here."""
        job = self.replicas.job
        if job is not None:
            # From here on, also while this worker waits below, its history of batches says that no
            # step follows in this epoch.
            self.replicas.first_batches.history.end()
            # The workers wait for each other, because Gloo aborts if a worker ends its process
            # while other workers still sum.
            job.all_have_one("end of the data", None)
        return self.model.get_metrics_result() if self._sum_metrics() else original(logs)


def _sums(rules: FitRules, columns: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    return rules.exchange(list(map(add_up, columns)))


def _rows_alone(iterator: Iterable[Any]) -> Iterator[Any]:
    """Yields the items of a Keras iterator, with each `WorkerShard` replaced by its rows."""
    for *place, batches in iterator:
        yield (*place, [one.rows if isinstance(one, WorkerShard) else one for one in batches])
