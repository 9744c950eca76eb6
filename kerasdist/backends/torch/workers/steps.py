"""How the steps of `fit`, `evaluate` and `predict` run on many workers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, final

import keras
import torch

from kerasdist import context, keras_seam
from kerasdist.backends.torch.loss_watch import LossWatch
from kerasdist.backends.torch.pieces import Part, has_rows, piece_of
from kerasdist.backends.torch.steps import Function, Step, Steps, ensure_built, joined
from kerasdist.backends.torch.variables import is_sum
from kerasdist.backends.torch.workers.fit_state import FitState
from kerasdist.backends.torch.workers.logs import Logs
from kerasdist.backends.torch.workers.overlap import Overlap
from kerasdist.input.dividing import examples
from kerasdist.input.shares import WorkerRows
from kerasdist.structures import flatten, pack
from kerasdist.training.metrics import metrics_of, settle

if TYPE_CHECKING:
    from kerasdist.backends.torch.workers.group import Group
    from kerasdist.backends.torch.workers.replicas import WorkerReplicaSet


@final
class WorkerSteps(Steps):
    """Takes this worker's piece of each global batch.

    A batch with fewer examples than workers, and all of another model's step in a replica, is plain
    Keras's, on every worker alike.
    """

    def __init__(self, model: Any) -> None:
        """Makes them.

        Args:
            model: A model with a `TorchTrainer`.
        """
        self._model = model
        self._replicas: WorkerReplicaSet = model.replica_set
        self._group = self._replicas.group
        self._watch = LossWatch(self._of_everyone)
        self._in_parts: FitState | None = None

    def training(self, step: Step, alone: Step) -> Function:
        """Returns a function that takes training steps and returns the last one's logs.

        Args:
            step: The step of a piece.
            alone: The step of a batch that is not divided.
        """
        if not self._model.trains_by_kerass_own_step:
            return self.logging(step, alone)
        return self._logging(step, alone, Overlap(self._model, self._replicas.gradient_sum))

    def logging(self, step: Step, alone: Step) -> Function:
        """Returns a function that takes steps and returns the last one's logs, on every worker.

        Args:
            step: The step of a piece.
            alone: The step of a batch that is not divided.
        """
        return self._logging(step, alone, None)

    def _logging(self, step: Step, alone: Step, overlap: Overlap | None) -> Function:
        model = self._model
        own_steps = model.runs_kerass_own_steps
        for metric in metrics_of(model):
            settle(metric, model.bound_strategy)
        state = FitState(self._group, _sums_of(model), _written_alike(model))

        def own_part(part: Part) -> Any:
            share = part.share
            collectives = self._replicas.collectives
            with self._replicas.replica(model.bound_strategy, share):
                collectives.begin(part.weight, state, overlap)
                state.begin(part.weight)
                logs = step(part.argument)
                results = {} if own_steps else model.get_metrics_result()
            if collectives.loss is not None:
                self._watch.note([collectives.loss])
            if own_steps and not self._replicas.batch_logs_matter:
                state.end(keep_parts=True)
                self._in_parts = state
                return {}
            if own_steps:
                state.end()
                return model.get_metrics_result()
            report = Logs(logs, results, part.weight, is_chief=self._group.rank == 0)
            totals = state.end(report.parts)
            return report.combined(totals, model.get_metrics_result())

        def run(batches: Sequence[Any]) -> Any:
            for given in batches:
                batch = self._shared_out(given)
                part = self._own_part(batch)
                if part is None:
                    self.settle()
                    logs = alone(batch)
                else:
                    logs = own_part(part)
            return logs

        return run

    def predicting(self, step: Step, alone: Step) -> Function:
        """Returns a function that takes steps and returns all rows' predictions, on every worker.

        Args:
            step: The step of a piece.
            alone: The step of a batch that is not divided.
        """
        model = self._model
        state = FitState(self._group, (), ())

        def predictions(given: Any) -> Any:
            batch = self._shared_out(given)
            part = self._own_part(batch)
            if part is None:
                return alone(batch)
            ensure_built(model, part.argument)
            with self._replicas.replica(model.bound_strategy, part.share):
                self._replicas.collectives.begin(part.weight, state)
                state.begin(part.weight)
                own = step(part.argument)
            state.end()
            return of_all(self._group, own, "predict")

        return lambda batches: joined([predictions(batch) for batch in batches])

    def settle(self) -> bool:
        """Adds up the metrics, if that has been put off, as nobody looked at the logs of batches.

        Returns:
            Whether it had been.
        """
        state, self._in_parts = self._in_parts, None
        if state is not None:
            state.settle()
        return state is not None

    def end(self) -> bool:
        """Ends a loop: warns if a loss was finite on some workers and not on others.

        Returns:
            Whether the last step's logs are still to be made.
        """
        self._watch.look()
        return self.settle()

    def _own_part(self, batch: Any) -> Part | None:
        """This worker's piece of a batch, or None if every worker does it all."""
        if context.replica() is not None:
            return None
        self._replicas.begin_step()
        self._replicas.first_batches.compare()
        total = batch.total if isinstance(batch, WorkerRows) else examples(batch)
        self._replicas.course.note(total)
        return piece_of(batch, self._group.rank, self._group.size)

    def _shared_out(self, batch: Any) -> Any:
        """A batch of which every worker has some rows; or the global one, on every worker."""
        if not isinstance(batch, WorkerRows) or min(batch.sizes) > 0:
            return batch
        # The data of some workers have ended. They get rows of the others', to help with them.
        return of_all(self._group, batch.rows, "share out a batch")

    def _of_everyone(self, finite: list[bool]) -> list[list[bool]]:
        return self._group.gather_alike(torch.tensor(finite)).tolist()


def of_all(group: Group, own: Any, purpose: str) -> Any:
    """Returns the rows of all workers, one after another. All workers must call it.

    Args:
        group: The workers.
        own: Tensors with the rows of this worker along axis 0, in any structure.
        purpose: What it is for, for messages.
    """
    leaves = flatten(own)
    tensors = [
        (index, keras_seam.ops.convert_to_tensor(leaf))
        for index, leaf in enumerate(leaves)
        if leaf is not None
    ]
    if tensors:
        every = group.gather(purpose, [tensor for _, tensor in tensors], 0)
        for (index, tensor), *parts in zip(tensors, *every, strict=True):
            # A scalar belongs to no example: the chief's.
            leaves[index] = torch.cat(parts) if has_rows(tensor) else parts[0]
    return pack(own, leaves)


def _sums_of(model: Any) -> Iterator[Any]:
    for metric in metrics_of(model):
        yield from filter(is_sum, metric.variables)


def _written_alike(model: Any) -> Iterator[Any]:
    """The variables to which all workers assign the same, from what they have gathered."""
    if model.bound_strategy.options.batch_norm == "per_replica":
        return
    for layer in keras_seam.flat_layers(model):
        if isinstance(layer, keras.layers.BatchNormalization) and layer.built:
            yield from (layer.moving_mean, layer.moving_variance)
