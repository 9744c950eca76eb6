"""How the steps of `fit`, `evaluate` and `predict` run on replicas that are threads."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, final

import keras
import torch

from kerasdist import context
from kerasdist.backends.torch.loss_watch import LossWatch
from kerasdist.backends.torch.pace import Pace
from kerasdist.backends.torch.pieces import Division, divide, join
from kerasdist.training.logs import global_logs
from kerasdist.training.metrics import metrics_of, settle

# A step of Keras's or the user's, of a batch.
Step = Callable[[Any], Any]

# What Keras's loops call, with a list of batches.
Function = Callable[[Sequence[Any]], Any]


class Steps(abc.ABC):
    """How the steps of one model run."""

    @abc.abstractmethod
    def logging(self, step: Step, alone: Step) -> Function:
        """Returns a function that takes steps and returns the last one's logs.

        Args:
            step: The step, which each replica takes with its piece of the batch.
            alone: The same for a batch that is not divided.
        """

    def training(self, step: Step, alone: Step) -> Function:
        """Returns a function that takes training steps and returns the last one's logs.

        Args:
            step: The step, which each replica takes with its piece of the batch.
            alone: The same for a batch that is not divided.
        """
        return self.logging(step, alone)

    @abc.abstractmethod
    def predicting(self, step: Step, alone: Step) -> Function:
        """Returns a function that takes steps and returns their predictions, one after another.

        Args:
            step: The step, which each replica takes with its piece of the batch.
            alone: The same for a batch that is not divided.
        """

    @abc.abstractmethod
    def end(self) -> bool:
        """Ends a loop: warns if a loss was finite on some replicas and not on others.

        Returns:
            Whether the last step's logs are still to be made.
        """


@final
class SoleSteps(Steps):
    """The steps of a model with one replica: plain Keras's."""

    def logging(self, step: Step, alone: Step) -> Function:
        """Returns a function that takes the steps as they are.

        Args:
            step: Not needed.
            alone: The step.
        """
        del step

        def run(batches: Sequence[Any]) -> Any:
            for batch in batches:
                logs = alone(batch)
            return logs

        return run

    def predicting(self, step: Step, alone: Step) -> Function:
        """Returns a function that takes the steps as they are.

        Args:
            step: Not needed.
            alone: The step.
        """
        del step
        return lambda batches: joined([alone(batch) for batch in batches])

    def end(self) -> bool:
        """Ends a loop, after which nothing is left to do."""
        return False


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
class ThreadSteps(Steps):
    """Divides each global batch over the threads of a strategy.

    A batch that cannot be divided, and all of another model's step in a replica, is plain Keras's.
    """

    def __init__(self, model: Any) -> None:
        """Makes them.

        Args:
            model: A model with a `TorchTrainer`.
        """
        self._model = model
        self._replicas = model.replica_set
        self._watch = LossWatch()

    def logging(self, step: Step, alone: Step) -> Function:
        """Returns a function that takes steps and returns the last one's logs.

        Args:
            step: The step of a piece.
            alone: The step of a batch that is not divided.
        """
        model = self._model
        own_steps = model.runs_kerass_own_steps
        for metric in metrics_of(model):
            settle(metric, model.bound_strategy)
        pace = Pace(model, on_cpu=self._replicas.on_cpu)

        def replica_step(piece: Any) -> Report:
            replica = context.replica()
            logs = step(piece)
            reads = not own_steps and replica.replica_id_in_sync_group == 0  # type: ignore[union-attr]
            results = model.get_metrics_result() if reads else {}
            return Report(logs, results, replica.collectives.loss)  # type: ignore[union-attr]

        def run(batches: Sequence[Any]) -> Any:
            for batch in batches:
                division = self._division(batch)
                if division is None:
                    logs = alone(batch)
                else:
                    reports = self._replicas.run(
                        model.bound_strategy, replica_step, division.parts, pace.of_step
                    )
                    self._watch.note([report.loss for report in reports])
            if division is None:
                return logs
            if own_steps:
                return model.get_metrics_result()
            return self._global_logs(reports, division)

        return run

    def predicting(self, step: Step, alone: Step) -> Function:
        """Returns a function that takes steps and returns their predictions.

        Args:
            step: The step of a piece.
            alone: The step of a batch that is not divided.
        """
        model = self._model
        pace = Pace(model, on_cpu=self._replicas.on_cpu)

        def predictions(batch: Any) -> Any:
            division = self._division(batch)
            if division is None:
                return alone(batch)
            ensure_built(model, batch)
            return join(
                self._replicas.run(model.bound_strategy, step, division.parts, pace.of_step)
            )

        return lambda batches: joined([predictions(batch) for batch in batches])

    def end(self) -> bool:
        """Ends a loop: warns if a loss was finite on some replicas and not on others."""
        self._watch.look()
        return False

    def _division(self, batch: Any) -> Division | None:
        """The pieces of a batch, or None if there is one to do it all."""
        if context.replica() is not None:
            return None
        return divide(batch, self._replicas.num_replicas)

    @torch.no_grad()
    def _global_logs(self, reports: Sequence[Report], division: Division) -> Any:
        logs = [report.logs for report in reports]
        results = [report.results for report in reports]
        return global_logs(logs, results, self._model.get_metrics_result(), division.weights)


def ensure_built(model: Any, batch: Any) -> None:
    """Builds a model before replicas call it for predictions.

    `fit` and `evaluate` build the model first, Keras's `predict` lets the first call do it.

    Args:
        model: The model.
        batch: A batch of its data.
    """
    if not model.built:
        model.ensure_built(keras.utils.unpack_x_y_sample_weight(batch)[0])


def joined(outputs: Sequence[Any]) -> Any:
    """Returns the predictions of several batches, one after another.

    Args:
        outputs: Those of each batch.
    """
    return outputs[0] if len(outputs) == 1 else join(outputs)
