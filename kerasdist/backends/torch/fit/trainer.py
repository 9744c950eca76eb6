"""The trainer of models made under a strategy on PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import TYPE_CHECKING, Any, final

import torch

from kerasdist import keras_compat
from kerasdist.backends.base.metering import rows_of
from kerasdist.backends.torch.fit import passes
from kerasdist.backends.torch.fit.steps import Function, Step, Steps
from kerasdist.backends.torch.replica import modules
from kerasdist.backends.torch.replica.collectives import collectives_here
from kerasdist.backends.torch.replica.replicas import TorchReplicaSet
from kerasdist.backends.torch.state.variables import ReplicaScope
from kerasdist.backends.torch.workers.process_group import is_default_group_ours
from kerasdist.check.first_batch import FirstBatchCheck, may_differ
from kerasdist.core.context import current
from kerasdist.core.user_warnings import warn_user
from kerasdist.input.sharding import WorkerShard
from kerasdist.training.binding import binding_of
from kerasdist.training.passes import most_rows
from kerasdist.training.trainer import ReplicatedTrainer

_UNCOMPILED = (
    "jit_compile=True has no effect here on PyTorch: the model runs uncompiled, and its numbers "
    "are the same. "
)
_IN_THREADS = (
    "torch.compile knows one replica's variables, not those of each thread for several replicas in "
    "one process. A process per device compiles: `kerasdist run --workers gpu script.py`."
)
_GATHERS = (
    'With sharding="full" weights are gathered while the model runs, which torch.compile cannot '
    'follow. sharding="optimizer" compiles.'
)

# The name under which a model keeps its `Steps`.
_STEPS = "_kerasdist_steps"


@cache
def install() -> None:
    """Keeps Keras's own data parallelism, from 3.16 on, from what a strategy does already.

    That Keras wraps every model by ``DistributedDataParallel``, and sums every metric, as soon as
    torch has a default process group, which a job makes. A strategy's model has the gradients and
    metrics of all workers; another one belongs to its worker alone, and what the chief evaluates in
    a callback would wait for the others for good. A group that the script has made itself serves
    the models outside of the scope, as in plain Keras.
    """
    if keras_compat.HAS_DDP:
        keras_compat.install(initialize_ddp=_initialize_ddp, metrics_result=_metrics_result)


def _initialize_ddp(original: Callable[..., None], model: object) -> None:
    if not _is_left_alone(model):
        original(model)


def _metrics_result(original: Callable[..., Any], model: object) -> Any:
    return keras_compat.metrics_here(model) if _is_left_alone(model) else original(model)


def _is_left_alone(model: object) -> bool:
    return binding_of(model) is not None or is_default_group_ours()


@final
class TorchTrainer(ReplicatedTrainer):
    """Makes the functions that Keras's own loops call, so that a model's steps run on replicas."""

    if TYPE_CHECKING:
        replica_set: TorchReplicaSet

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Calls the model, in passes where there are more examples than it shall have at once."""
        most = most_rows()
        if most is None or not torch.is_grad_enabled():
            return self._call_at_once(*args, **kwargs)
        return passes.calls(self, self._call_at_once, args, kwargs, most)

    def _call_at_once(self, *args: object, **kwargs: object) -> Any:
        """Calls the model, compiled in a worker's replica with ``jit_compile=True``."""
        scope, trial = keras_compat.get_stateless_scope(), current.trial
        compiled = scope.rules.compiled if isinstance(scope, ReplicaScope) else None
        collectives = collectives_here() if compiled else None
        if compiled and collectives and trial is None:
            return compiled(collectives, self, super().__call__, args, kwargs)
        outputs = super().__call__(*args, **kwargs)
        if trial is not None:
            trial.record_outputs(self, outputs)
        return outputs

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients of the replica that runs this; outside, torch's own does it."""
        scope = modules.scope_here()
        if scope is None:
            super().zero_grad(set_to_none)
        else:
            scope.clear_gradients(self.trainable_variables)

    def make_train_function(self, force: bool = False) -> Any:
        """Makes ``train_function(batches)``: one step per batch; returns the last one's logs."""

        def step(batch: object) -> Any:
            return self.train_step(batch)

        if self.train_function is None or force:
            function = self._steps().training(step, self._as_plain_keras(step))
            self.train_function = self._checked(function) if may_differ(self) else function
        return self.train_function

    def _checked(self, function: Function) -> Function:
        """Wraps a train function to compare its first step with that of one device."""
        check = FirstBatchCheck(self)

        def checked(batches: Any) -> Any:
            for batch in batches:
                size = rows_of(batch)
                if check.wants(size):
                    check.look(batch, size)
            if check.is_done:
                self.train_function = function
            return function(batches)

        return checked

    def make_test_function(self, force: bool = False) -> Any:
        """Makes ``test_function(batches)``: one step per batch; returns the last one's logs."""

        def step(batch: object) -> Any:
            with torch.no_grad():
                return self.test_step(batch)

        if self.test_function is None or force:
            self.test_function = self._steps().logging(step, self._as_plain_keras(step))
        return self.test_function

    def make_predict_function(self, force: bool = False) -> Any:
        """Makes ``predict_function(batches)``: the predictions of all batches, concatenated."""

        def step(batch: object) -> Any:
            with torch.no_grad():
                return self.predict_step(batch)

        if self.predict_function is None or force:
            self.predict_function = self._steps().predicting(step, self._as_plain_keras(step))
        return self.predict_function

    def _symbolic_build(self, iterator: Any = None, data_batch: Any = None) -> None:
        # Keras builds the model from a batch of the iterator, which cannot be a `WorkerShard`.
        seen = None if iterator is None else _rows_alone(iterator)
        super()._symbolic_build(seen, data_batch)

    def _steps(self) -> Steps:
        steps = vars(self).get(_STEPS)
        if steps is None:
            steps = Steps(self)
            object.__setattr__(self, _STEPS, steps)  # bypasses Keras's tracking of attributes
        return steps

    def _as_plain_keras(self, step: Step) -> Step:
        if not self._should_torch_compile():
            return step
        if self.replica_set.is_plain:
            return torch.compile(step)
        if not self.compiles_in_replicas:
            warn_user(_UNCOMPILED + (_GATHERS if self._gathers_weights else _IN_THREADS))
        return step

    @property
    def compiles_in_replicas(self) -> bool:
        """Whether the model is compiled where it is called in a step of a replica."""
        is_worker = self.replica_set.job is not None  # whose variables are where it computes
        return is_worker and not self._gathers_weights and self._should_torch_compile()

    @property
    def _gathers_weights(self) -> bool:
        rules = self.replica_set.shard_rules
        return rules is not None and rules.shards_weights

    def _compute_loss(self, *args: object, **kwargs: object) -> Any:
        loss = super()._compute_loss(*args, **kwargs)
        if current.replica is None:
            return loss
        if kwargs.get("training") and loss.ndim > 0 and loss.numel() == 1:
            # With `reduction=None` there is a loss per example. torch refuses to differentiate the
            # losses of the global batch, so it must refuse a replica's single one, too.
            return loss.expand(2)
        return loss

    def _get_metrics_result_or_logs(self, logs: Any) -> Any:
        job = self.replica_set.job
        if job is not None:
            self.replica_set.first_batches.history.end()  # while it waits for the others
            # Gloo aborts if they are in a step's sums meanwhile.
            job.all_have_one("end of the data", None)
        if self._steps().end():  # once an epoch, when Keras waits for the device anyway
            return self.get_metrics_result()
        return super()._get_metrics_result_or_logs(logs)

    def _sync_metrics(self) -> None:
        """Does nothing: `Steps` sums metrics over workers, as Keras after 3.15 would do here."""


def _rows_alone(iterator: Iterable[Any]) -> Iterator[Any]:
    """Yields the items of a Keras iterator, with the rows of a `WorkerShard` in its place."""
    for *place, batches in iterator:
        yield (*place, [one.rows if isinstance(one, WorkerShard) else one for one in batches])
