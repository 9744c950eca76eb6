"""A training step tried on one device and on the workers, on PyTorch."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any, final

from kerasdist.backends.torch.trial import TorchTrial
from kerasdist.backends.torch.workers.steps import of_all
from kerasdist.backends.trial import TriedBatch
from kerasdist.input import sharding
from kerasdist.input.batch_forms import Course
from kerasdist.input.shares import WorkerRows

if TYPE_CHECKING:
    from kerasdist.backends.torch.workers.replicas import WorkerReplicaSet


@final
class WorkerTrial(TorchTrial):
    """Tries the step with the other workers: each takes one device's step by itself."""

    def __init__(self, model: Any) -> None:
        """Prepares a trial.

        Args:
            model: A model with a `TorchTrainer`, built.
        """
        super().__init__(model)
        self._replicas: WorkerReplicaSet = model.replica_set
        self._open = ExitStack()

    def __enter__(self) -> WorkerTrial:
        super().__enter__()
        replicas = self._replicas
        self._open.callback(setattr, replicas, "course", replicas.course)
        self._open.callback(setattr, replicas, "batch_logs_matter", replicas.batch_logs_matter)
        replicas.course, replicas.batch_logs_matter = Course(), True
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()
        super().__exit__(*error)

    def gathered(self, batch: Any, *, spares: bool) -> TriedBatch:
        """Returns a batch with the rows of all workers."""
        if not isinstance(batch, WorkerRows):
            return super().gathered(batch, spares=spares)
        group, purpose = self._replicas.group, "check the first batch"
        if min(batch.sizes) == 0:  # the steps share out what there is
            return super().gathered(of_all(group, batch.rows, purpose), spares=spares)
        if spares:
            sizes = sharding.spared(batch.sizes)
            batch = replace(batch, rows=self.first_rows(batch.rows, sizes[batch.rank]), sizes=sizes)
        return TriedBatch(batch, of_all(group, batch.rows, purpose), batch.sizes)
