"""The trainer of models made under a strategy on PyTorch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, final

import keras
import torch

from kerasdist import context
from kerasdist.backends.torch.collectives import TorchCollectives
from kerasdist.backends.torch.loss_watch import LossWatch
from kerasdist.backends.torch.pace import Pace
from kerasdist.backends.torch.pieces import Division, divide, join
from kerasdist.training.logs import global_logs
from kerasdist.training.metrics import metrics_of, settle
from kerasdist.training.trainer import ReplicatedTrainer

if TYPE_CHECKING:
    from kerasdist.backends.torch.replicas import TorchReplicaSet

Step = Callable[[Any], Any]

# The name under which a model keeps its `LossWatch`.
_WATCH = "_kerasdist_loss_watch"


class Report(NamedTuple):
    """What one replica's step tells.

    Attributes:
        logs: What the step returned.
        results: The replica's own results of the metrics, where they are needed.
        loss: The replica's loss, if Keras computed it.
    """

    logs: Any
    results: dict[str, Any]
    loss: torch.Tensor | None


@final
class TorchTrainer(ReplicatedTrainer):
    """Divides each global batch over the replicas; Keras's own loops call it.

    With one replica, for a batch that cannot be divided, and inside a replica of another model's
    step, it takes the step as plain Keras does.
    """

    if TYPE_CHECKING:
        replica_set: TorchReplicaSet

    def make_train_function(self, force: bool = False) -> Any:
        """Makes ``train_function(batches)``: a training step a batch; returns the last one's logs.

        Args:
            force: Whether to make it again.
        """

        def step(batch: Any) -> Any:
            return self.train_step(batch)  # type: ignore[attr-defined]

        if self.train_function is None or force:
            self.train_function = self._logging_function(step)
        return self.train_function

    def make_test_function(self, force: bool = False) -> Any:
        """Makes ``test_function(batches)``: a test step a batch; returns the last one's logs.

        Args:
            force: Whether to make it again.
        """

        def step(batch: Any) -> Any:
            with torch.no_grad():
                return self.test_step(batch)  # type: ignore[attr-defined]

        if self.test_function is None or force:
            self.test_function = self._logging_function(step)
        return self.test_function

    def make_predict_function(self, force: bool = False) -> Any:
        """Makes ``predict_function(batches)``: the predictions of all batches, one after another.

        Args:
            force: Whether to make it again.
        """

        def step(batch: Any) -> Any:
            with torch.no_grad():
                return self.predict_step(batch)  # type: ignore[attr-defined]

        if self.predict_function is None or force:
            self.predict_function = self._predicting_function(step)
        return self.predict_function

    def _logging_function(self, step: Step) -> Callable[[Sequence[Any]], Any]:
        own_steps = self.runs_kerass_own_steps
        alone = self._as_plain_keras(step)

        def run_alone(batches: Sequence[Any]) -> Any:
            for batch in batches:
                logs = alone(batch)
            return logs

        if self.replica_set.num_replicas == 1:
            return run_alone
        for metric in metrics_of(self):
            settle(metric, self.bound_strategy)
        watch, pace = LossWatch(), Pace(self, on_cpu=self.replica_set.on_cpu)
        object.__setattr__(self, _WATCH, watch)  # past Keras's tracking of attributes

        def replica_step(piece: Any) -> Report:
            replica = context.replica()
            logs = step(piece)
            reads = not own_steps and replica.replica_id_in_sync_group == 0  # type: ignore[union-attr]
            results = self.get_metrics_result() if reads else {}
            return Report(logs, results, replica.collectives.loss)  # type: ignore[union-attr]

        def run(batches: Sequence[Any]) -> Any:
            for batch in batches:
                division = self._division(batch)
                if division is None:
                    logs = alone(batch)
                else:
                    reports = self.replica_set.run(
                        self.bound_strategy, replica_step, division.parts, pace.of_step
                    )
                    watch.note([report.loss for report in reports])
            if division is None:
                return logs
            if own_steps:
                return self.get_metrics_result()
            return self._global_logs(reports, division)

        return run

    def _predicting_function(self, step: Step) -> Callable[[Sequence[Any]], Any]:
        alone = self._as_plain_keras(step)
        pace = Pace(self, on_cpu=self.replica_set.on_cpu)

        def run(batches: Sequence[Any]) -> Any:
            outputs = []
            for batch in batches:
                division = self._division(batch)
                if division is None:
                    outputs.append(alone(batch))
                else:
                    if not self.built:  # type: ignore[attr-defined]
                        # fit and evaluate build the model first, Keras's predict lets the first
                        # call do it.
                        self.ensure_built(keras.utils.unpack_x_y_sample_weight(batch)[0])
                    outputs.append(
                        join(
                            self.replica_set.run(
                                self.bound_strategy, step, division.parts, pace.of_step
                            )
                        )
                    )
            return outputs[0] if len(outputs) == 1 else join(outputs)

        return run

    def _division(self, batch: Any) -> Division | None:
        """The pieces of a batch, or None if there is one to do it all."""
        replicas = self.replica_set.num_replicas
        return None if replicas == 1 or context.replica() is not None else divide(batch, replicas)

    def _as_plain_keras(self, step: Step) -> Step:
        if not self._should_torch_compile():  # type: ignore[attr-defined]
            return step
        if self.replica_set.num_replicas == 1:
            return torch.compile(step)
        warnings.warn(
            "jit_compile=True has no effect on several replicas in one process on PyTorch: "
            "torch.compile cannot trace through the meetings of replicas. The model runs "
            "uncompiled; its numbers are the same.",
            stacklevel=4,
        )
        return step

    @torch.no_grad()
    def _global_logs(self, reports: Sequence[Report], division: Division) -> Any:
        logs = [report.logs for report in reports]
        results = [report.results for report in reports]
        return global_logs(logs, results, self.get_metrics_result(), division.weights)

    def _compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super()._compute_loss(*args, **kwargs)  # type: ignore[misc]
        replica = context.replica()
        if replica is None or not isinstance(replica.collectives, TorchCollectives):
            return loss
        replica.collectives.loss = loss.detach()
        if kwargs.get("training") and loss.ndim > 0 and loss.numel() == 1:
            # A loss a example (`reduction=None`): torch refuses to differentiate the global
            # batch's, so it must refuse a replica's of one example, too.
            return loss.expand(2)
        return loss

    def _get_metrics_result_or_logs(self, logs: Any) -> Any:
        watch = vars(self).get(_WATCH)
        if watch is not None:
            watch.look()  # at the end of an epoch, when Keras waits for the device anyway
        return super()._get_metrics_result_or_logs(logs)  # type: ignore[misc]
