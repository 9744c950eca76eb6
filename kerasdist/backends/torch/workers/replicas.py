"""The replicas of many workers on PyTorch: one here, one in each of the other processes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import TYPE_CHECKING, Any, final

import keras
import torch

from kerasdist import context, keras_seam
from kerasdist.backends import checksums
from kerasdist.backends.base import ReplicaOptions, ReplicaSet
from kerasdist.backends.runner import Runner
from kerasdist.backends.torch import batch_norm, convolutions, draws, fused_adam, masks
from kerasdist.backends.torch.draws import StepDraws
from kerasdist.backends.torch.host_memory import keep_freed_memory
from kerasdist.backends.torch.placing import keras_name, torch_device
from kerasdist.backends.torch.workers import modules
from kerasdist.backends.torch.workers.collectives import WorkerCollectives
from kerasdist.backends.torch.workers.gradients import GradientSum
from kerasdist.backends.torch.workers.group import Group
from kerasdist.backends.torch.workers.loop_state import LoopState
from kerasdist.backends.torch.workers.rows import OwnRowsAdapter, WholeBatchesAdapter
from kerasdist.collectives import CommunicationOptions
from kerasdist.devices import Device
from kerasdist.errors import UnsupportedError
from kerasdist.input.sharded import ShardedAdapter
from kerasdist.job.job import Job
from kerasdist.replica_context import BatchShare, ReplicaContext

if TYPE_CHECKING:
    from kerasdist.backends.torch.steps import Steps
    from kerasdist.backends.trial import Trial
    from kerasdist.strategy import Strategy


@final
class WorkerReplicaSet(ReplicaSet):
    """One device of this worker, and the workers that hold the other replicas.

    Replica code reads and writes the variables themselves, as there is no other replica in this
    process that could want them otherwise.
    """

    def __init__(
        self,
        devices: Sequence[Device],
        options: ReplicaOptions,
        job: Job,
        communication: CommunicationOptions,
    ) -> None:
        """Makes the set. All workers must call it, after `connect`.

        Args:
            devices: This worker's device.
            options: How to compute.
            job: The job of this process.
            communication: How to communicate.

        Raises:
            UnsupportedError: If there are several devices.
        """
        if len(devices) != 1:
            raise UnsupportedError(
                "Expected one device a worker on PyTorch, where a process computes on one. "
                f"Received: devices={[str(device) for device in devices]}. Start one worker a "
                f"device: kerasdist run --workers N script.py, or name one: "
                f"devices=[{str(devices[0])!r}]."
            )
        super().__init__(devices, options, job)
        self._device = torch_device(devices[0])
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
            self._part_from_other_gpus(job.rank)
        else:
            keep_freed_memory()
        modules.install()
        masks.install()
        draws.install()
        fused_adam.install()
        convolutions.install()
        batch_norm.install()
        self.group = Group(job, self._device)
        self.loops = LoopState(self.group)
        self.gradient_sum = GradientSum(self.group, job, communication)
        self.collectives = WorkerCollectives(
            self.group, StepDraws(job.num_workers), self.loops, self.gradient_sum
        )
        self._context: ReplicaContext | None = None

    @cached_property
    def runner(self) -> Runner:
        """How user functions run on the devices."""
        from kerasdist.backends.torch.workers.runner import WorkerRunner  # it needs this file

        return WorkerRunner(self)

    @property
    def trainer_class(self) -> type[Any]:
        """The class that is put in front of a model's own."""
        from kerasdist.backends.torch.trainer import TorchTrainer  # it needs this file

        return TorchTrainer

    def steps(self, model: Any) -> Steps:
        """Returns how a model's steps run on the workers.

        Args:
            model: A model with the trainer of `trainer_class`.
        """
        from kerasdist.backends.torch.workers.steps import WorkerSteps  # it needs this file

        return WorkerSteps(model)

    def trial(self, model: Any) -> Trial:
        """Returns what a training step is tried with, together with the other workers.

        Args:
            model: A model with the trainer of `trainer_class`.
        """
        from kerasdist.backends.torch.workers.trial import WorkerTrial  # few programs need it

        return WorkerTrial(model)

    @property
    def gradients_travel_as(self) -> str | None:
        """The type in which gradients travel, if they are made smaller."""
        return self.gradient_sum.compression.dtype_name

    def data_adapter(self, adapter: Any) -> Any:
        """Returns an adapter that yields this worker's rows where they can be had alone.

        Args:
            adapter: The adapter that Keras made.
        """
        # In a replica, where a model may call another one's `predict`, batches are not divided.
        if context.replica() is not None or isinstance(adapter, ShardedAdapter):
            return adapter
        if not keras_seam.is_array_adapter(adapter):
            return WholeBatchesAdapter(adapter, self.first_batches)
        if not keras_seam.has_sparse(adapter):
            return OwnRowsAdapter(adapter, self.num_replicas, self.local_replicas)
        return adapter

    def placement(self) -> AbstractContextManager[Any]:
        """Returns Keras's scope of this worker's device."""
        if context.replica() is not None:
            return contextlib.nullcontext()
        return keras.device(keras_name(self.devices[0]))

    def equalize(self, variables: Sequence[Any]) -> None:
        """Gives variables the values that they have on the chief.

        Args:
            variables: Keras variables that have values.
        """
        own = [keras_seam.stored_value(variable).detach() for variable in variables]
        for mine, chiefs in zip(own, self.group.from_chief(own), strict=True):
            # What is equal stays as it is, and a component that goes with it stays valid.
            if not torch.equal(mine, chiefs):
                mine.copy_(chiefs)

    def checksums(self, variables: Sequence[Any]) -> list[int]:
        """Returns a checksum of each variable's value on this worker; computed where it lies."""
        values = [keras_seam.stored_value(variable).detach() for variable in variables]
        bits = [one.contiguous().reshape(-1).view(torch.uint8) for one in values]
        if self._device.type == "cpu":
            return [checksums.of_array(one.numpy()) for one in bits]
        sums = [one.sum(dtype=torch.int64) for one in bits]
        return torch.stack(sums).tolist() if sums else []

    @contextlib.contextmanager
    def replica(self, strategy: Strategy, share: BatchShare | None) -> Iterator[None]:
        """Returns a context for code of this worker's replica.

        Args:
            strategy: The strategy that owns this set.
            share: Its share of the global batch where the one-device contract holds, else None.
        """
        told = self._told(strategy, share)
        with keras.device(keras_name(self.devices[0])), context.replica_scope(told):
            yield

    def _told(self, strategy: Strategy, share: BatchShare | None) -> ReplicaContext:
        """The context of this step: the last one's, if it fits, since most batches are alike."""
        last = self._context
        if last is not None and last.strategy is strategy and last.share == share:
            last.layer_losses.clear()
            return last
        self._context = ReplicaContext(
            strategy=strategy,
            replica_id_in_sync_group=self.group.rank,
            num_replicas_in_sync=self.group.size,
            collectives=self.collectives,
            share=share,
        )
        return self._context

    def _part_from_other_gpus(self, rank: int) -> None:
        """Lets torch's own draws on GPUs differ by replica; equal seeds would drop equal units."""
        generator = torch.cuda.default_generators[self._device.index]
        if rank and generator.initial_seed() == torch.initial_seed():
            generator.manual_seed(generator.initial_seed() + rank)
