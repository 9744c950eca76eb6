"""Runs a training step on PyTorch, on one device or on the replicas, to compare the results."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, final

import keras
import torch

from kerasdist import keras_compat
from kerasdist.backends.base.trial import Draws, MemoryTrial, Trial, TriedBatch
from kerasdist.backends.torch import private
from kerasdist.backends.torch.fit.steps import buffers_of, layers_with_buffers, of_all
from kerasdist.backends.torch.replica.placing import default_generators, move
from kerasdist.backends.torch.state import shards
from kerasdist.input import sharding
from kerasdist.input.sharding import WorkerShard
from kerasdist.input.sources import copied


class TorchTrial(Trial):
    """Runs a step on clones of the variables, either on one device or on the replicas."""

    # The code that calls torch's modules (replica/modules.py) reads this attribute of a trial or a
    # `ReplicaScope`. If it is False, a module runs with other tensors in place of its parameters
    # and buffers.
    is_only = False

    @classmethod
    def gathered(cls, replicas: Any, batch: Any, *, spares: bool) -> TriedBatch:
        """Returns a `TriedBatch` with the rows of all workers.

        If `spares` is True, it has only the first rows, to save memory. All workers must call this
        method.
        """
        if not isinstance(batch, WorkerShard):
            return super().gathered(replicas, batch, spares=spares)
        group, purpose = replicas.group, "check a batch"
        if batch.least == 0:  # a worker has no rows, so the trainer gathers and divides all rows
            return super().gathered(replicas, of_all(group, batch.rows, purpose), spares=spares)
        if spares:
            sizes = sharding.trial_sizes(batch.sizes)
            rows = cls.first_rows(batch.rows, sizes[batch.rank])
            batch = WorkerShard.of_sizes(rows, sizes, batch.rank)
        return TriedBatch(batch, of_all(group, batch.rows, purpose), batch.sizes)

    @contextmanager
    def own_state_kept(self) -> Generator[None]:
        """When the block ends, restores the earlier values of the buffers of Keras's layers."""
        before = [
            (layer, name, one, one.clone())
            for layer in layers_with_buffers(self._model)
            for name, one in buffers_of(layer).items()
        ]
        try:
            yield
        finally:
            with torch.no_grad():
                for layer, name, one, value in before:
                    setattr(layer, name, one.copy_(value))

    def copy(self, variable: keras.Variable) -> torch.Tensor | None:
        """Returns a clone of a variable's value; a sharded variable is gathered first."""
        value = shards.read(variable)
        device = self._replicas.torch_devices[0]
        return None if value is None else _clone(move(device, value))

    def write(self, variable: keras.Variable, value: Any) -> None:
        """Assigns a value to the trial's copy of a variable."""
        with torch.no_grad():
            self.get_current_value(variable).copy_(value)

    def clear_gradients(self, variables: Iterable[keras.Variable]) -> None:
        """Clears the gradients of these variables' copies."""
        for value in keras_compat.stored_values(variables):
            if value is not None:
                value.grad = None

    def buffer(self, buffer: torch.Tensor, changing: bool = True) -> torch.Tensor:
        """Returns the trial's copy of a torch module's buffer; the first call makes the copy."""
        return self._copies.setdefault(id(buffer), (buffer, _clone(buffer)))[1]

    def take(self, batch: TriedBatch) -> Any:
        """Runs the step: in this thread for a trial of one device, otherwise on the replicas."""
        with self._replicas.placement():
            if self._alone:
                return self._step(batch.whole)
            return self._trainer.step_on_replicas(self._step, batch.given)

    def _step(self, batch: Any) -> Any:
        with private.intercept(_Drawing(self.draws, self.seed).run):
            # The batch is copied, because Keras multiplies sample weights by masks in place.
            return self._model.train_step(copied(batch))

    @staticmethod
    def as_array(value: Any) -> Any:
        """Returns a tensor as a NumPy array with its own memory."""
        return Trial.as_array(value.to_dense())


@final
class TorchMemoryTrial(MemoryTrial, TorchTrial):
    """Tries whether memory suffices for a step, which reads the variables, not copies of them."""

    def copy(self, variable: keras.Variable) -> torch.Tensor | None:
        """Returns a tensor that shares a variable's memory, and has a gradient of its own."""
        value = shards.read(variable)
        return None if value is None else value.detach().requires_grad_(value.requires_grad)

    def clear_gradients(self, variables: Iterable[keras.Variable]) -> None:
        """Clears the gradients.

        In a job the gradients become zeros, which take as much memory as the buckets of `fit`.
        """
        super().clear_gradients(variables)
        if self._replicas.job is None:
            return
        for value in keras_compat.stored_values(variables):
            if value is not None and value.requires_grad:
                value.grad = torch.zeros_like(value)


def _clone(value: torch.Tensor) -> torch.Tensor:
    return value.detach().clone().requires_grad_(value.requires_grad)


@final
class _Drawing:
    """Lets a trial's `Draws` supply the results of torch's random operators in this thread.

    So two trials whose results are compared get equal random numbers. Afterwards torch's own
    generators, which all threads share, are in the same state as if nothing had been drawn.
    """

    def __init__(self, draws: Draws, seed: int) -> None:
        self._draws = draws
        self._seeds = itertools.count(seed << 16)  # a seed for each draw

    def run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Runs an operator of torch."""
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        name = str(func.overloadpacket)
        if name == "aten.native_dropout":  # dropout on GPUs, which in a trial drops nothing
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        if name == "aten.randperm":
            # One device would permute more rows than a replica does, so their results could not be
            # compared. So in a trial rows keep their order.
            drawn = func(*args, **kwargs)
            return torch.arange(len(drawn), device=drawn.device).to(drawn.dtype)
        call = partial(self._call, func, args, kwargs)
        if name.endswith("_"):
            drawn = self._draws.draw(name, lambda: call().clone(), None)
            return args[0].copy_(drawn)
        return self._draws.draw(name, call, None)

    def _call(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Runs a random operator with a seed of the trial; then restores the generator's state."""
        tensors = [one for one in args if isinstance(one, torch.Tensor)]
        device = tensors[0].device if tensors else torch.device(kwargs.get("device") or "cpu")
        generator = default_generators(device)[-1]
        before = generator.get_state()
        generator.manual_seed(next(self._seeds))
        try:
            return func(*args, **kwargs)
        finally:
            generator.set_state(before)
