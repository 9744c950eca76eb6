"""The trainer of models made under a strategy on PyTorch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, final

import torch

from kerasdist import keras_compat
from kerasdist.backends.base.metering import rows_of
from kerasdist.backends.torch.fit import passes
from kerasdist.backends.torch.fit.batches import divide
from kerasdist.backends.torch.fit.steps import Function, Step, Steps
from kerasdist.backends.torch.replica import modules
from kerasdist.backends.torch.replica.collectives import collectives_here
from kerasdist.backends.torch.replica.replicas import TorchReplicaSet
from kerasdist.backends.torch.state.variables import ReplicaScope
from kerasdist.check import memory
from kerasdist.check.first_batch import FirstBatchCheck, may_differ
from kerasdist.core.context import current
from kerasdist.core.user_warnings import warn_user
from kerasdist.input.sharding import WorkerShard
from kerasdist.training.passes import most_rows, refused
from kerasdist.training.trainer import Original, ReplicatedTrainer

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
    """Makes the functions that Keras's own loops call, so that a model's steps run on replicas."""

    HOOKED = (*ReplicatedTrainer.HOOKED, "__call__", "zero_grad", "end_epoch")
    sums_metrics = True

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

    def make_train_function(self, original: Original, force: bool = False) -> Any:
        """Makes ``train_function(batches)``, which returns the logs of the last batch's step."""
        model = self.model

        def step(batch: object) -> Any:
            return model.train_step(batch)

        if model.train_function is None or force:
            self._require_places_of_gradients()
            function = self._steps.make_function(step, self._as_plain_keras(step), trains=True)
            model.train_function = self._checked(function) if may_differ(model) else function
        return model.train_function

    def _require_places_of_gradients(self) -> None:
        """Refuses several GPUs if Keras lacks the functions that `fit/backward.py` replaces.

        Without them, Python code in torch's backward threads could not find its replica.
        """
        if self.replicas.num_replicas > 1 and not self.replicas.on_cpu:
            keras_compat.internals.REMAT.require()
            keras_compat.internals.CUSTOM_GRADIENT.require()

    def _checked(self, function: Function) -> Function:
        """Wraps a train function so that its first step is compared with the step on one device."""
        check = FirstBatchCheck(self.model)

        def checked(batches: Any) -> Any:
            for batch in batches:
                size = rows_of(batch)
                if check.wants(size):
                    check.look(batch, size)
            if check.is_done:
                self.model.train_function = function
            return function(batches)

        return checked

    def make_test_function(self, original: Original, force: bool = False) -> Any:
        """Makes ``test_function(batches)``, which returns the logs of the last batch's step."""
        model = self.model
        if model.test_function is None or force:
            step = self._without_gradients("test_step")
            model.test_function = self._steps.make_function(step, self._as_plain_keras(step))
        return model.test_function

    def make_predict_function(self, original: Original, force: bool = False) -> Any:
        """Makes ``predict_function(batches)``, which returns all predictions, concatenated."""
        model, steps = self.model, self._steps
        if model.predict_function is None or force:
            step = self._without_gradients("predict_step")
            model.predict_function = steps.make_predict_function(step, self._as_plain_keras(step))
        return model.predict_function

    def _without_gradients(self, name: str) -> Step:
        model = self.model

        def step(batch: object) -> Any:
            with torch.no_grad():
                return getattr(model, name)(batch)

        return step

    def build_symbolically(
        self, original: Original, iterator: Any = None, data_batch: Any = None
    ) -> None:
        """Builds unbuilt layers; in place of a `WorkerShard` Keras gets the shard's rows."""
        seen = None if iterator is None else _rows_alone(iterator)
        super().build_symbolically(original, seen, data_batch)

    def require_passes(self) -> None:
        """Refuses a model that is known not to support calls in several passes."""
        if self._gathers_weights:
            raise refused(
                'weights that are sharded (sharding="full"), which each pass would gather, or that '
                "a LayoutMap divides"
            )
        # Read directly, because torch's compiler cannot trace `uses_torch_compile`.
        if self.model.jit_compile:
            raise refused("jit_compile=True")
        super().require_passes()

    def find_rows(self, batch: Any) -> None:
        """Finds how many rows of a batch a replica can compute at once, as its memory allows.

        All workers must call this method.
        """
        replicas, examples = self.replicas, rows_of(batch)
        rows = -(-examples // replicas.num_replicas)
        rows = batch.size if isinstance(batch, WorkerShard) else rows
        memory.find(self, examples, rows, partial(self._try_step, batch))

    def _try_step(self, batch: Any) -> None:
        """Computes the gradients of a step on the first replica's rows, to try out the memory."""
        from kerasdist.backends.torch.fit.trial import TorchMemoryTrial  # few programs need it

        replicas = self.replicas
        local, devices = replicas.local_replicas[:1], replicas.torch_devices
        parts = None if replicas.is_plain else divide(batch, replicas.num_replicas, local, devices)
        with replicas.placement():
            rows = batch if parts is None else parts[0].argument
            memory.try_step(self.model, TorchMemoryTrial(self), rows)

    @cached_property
    def _steps(self) -> Steps:
        return Steps(self)

    def _as_plain_keras(self, step: Step) -> Step:
        if not keras_compat.uses_torch_compile(self.model):
            return step
        if self.replicas.is_plain:
            return torch.compile(step)
        if not self.compiles_in_replicas:
            warn_user(_UNCOMPILED + (_GATHERS if self._gathers_weights else _IN_THREADS))
        return step

    @property
    def compiles_in_replicas(self) -> bool:
        """Whether calls of the model in a replica's step are compiled."""
        # Compiled code reads the variables themselves. A replica does so only if it is the only one
        # of its process, as in a job.
        is_worker = self.replicas.job is not None
        is_asked = is_worker and not self._gathers_weights
        return is_asked and keras_compat.uses_torch_compile(self.model)

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
        return self.model.get_metrics_result() if self._steps.end() else original(logs)


def _rows_alone(iterator: Iterable[Any]) -> Iterator[Any]:
    """Yields the items of a Keras iterator, with each `WorkerShard` replaced by its rows."""
    for *place, batches in iterator:
        yield (*place, [one.rows if isinstance(one, WorkerShard) else one for one in batches])
