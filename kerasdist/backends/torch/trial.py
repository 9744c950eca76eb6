"""Tries a training step on one device and on the replicas, on PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from typing import Any, final

import keras
import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from kerasdist import keras_compat
from kerasdist.backends.torch import divided_state, shards, states
from kerasdist.backends.torch.steps import of_all
from kerasdist.backends.trial import Draw, Trial, TriedBatch
from kerasdist.input import sharding
from kerasdist.input.batch_forms import BatchHistory
from kerasdist.input.sharding import rows
from kerasdist.input.worker_shard import WorkerShard

_DRAWING = frozenset(
    {
        torch.bernoulli,
        torch.multinomial,
        torch.normal,
        torch.poisson,
        torch.rand,
        torch.rand_like,
        torch.randint,
        torch.randint_like,
        torch.randn,
        torch.randn_like,
    }
)
_DRAWING_IN_PLACE = frozenset(
    {
        torch.Tensor.bernoulli_,
        torch.Tensor.exponential_,
        torch.Tensor.normal_,
        torch.Tensor.random_,
        torch.Tensor.uniform_,
    }
)
_LEAVING_OUT = frozenset(
    {
        torch.dropout,
        torch.nn.functional.alpha_dropout,
        torch.nn.functional.dropout,
        torch.nn.functional.dropout1d,
        torch.nn.functional.dropout2d,
        torch.nn.functional.dropout3d,
        torch.nn.functional.feature_alpha_dropout,
    }
)

# The seed of all workers' draws in a trial.
_SEED = 0


class TorchTrial(Trial):
    """Lets steps write into the variables themselves, and restores their values afterwards."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        # By the tensor's id: the tensor, a copy of its value, and a copy of its gradient.
        self._kept: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]] = {}
        self._open = ExitStack()

    def __enter__(self) -> TorchTrial:
        self._open.callback(states.set_gpu_random_states, states.gpu_random_states())
        self._open.callback(states.set_random_state, states.random_state())
        replicas = self._model.replica_set
        self._open.callback(setattr, replicas, "batch_history", replicas.batch_history)
        self._open.callback(setattr, replicas, "batch_logs_matter", replicas.batch_logs_matter)
        replicas.batch_history, replicas.batch_logs_matter = BatchHistory(), True
        # A step on one device then needs no other worker.
        optimizer = self._model.optimizer
        state = [*self._model.variables, *(optimizer.variables if optimizer else ())]
        self._open.enter_context(shards.whole(state))
        for buffer in self._model.buffers():
            self._keep(buffer)
        for parameter in self._model.parameters():
            self._keep(parameter)
        return self

    def __exit__(self, *error: object) -> None:
        self.restore()
        self._kept.clear()
        self._open.close()
        divided_state.divide_after_trial()

    def gathered(self, batch: Any, *, spares: bool) -> TriedBatch:
        """Returns a batch with the rows of all workers."""
        if not isinstance(batch, WorkerShard):
            return super().gathered(batch, spares=spares)
        group, purpose = self._model.replica_set.group, "check the first batch"
        if min(batch.sizes) == 0:  # then `Steps` divides the global batch
            return super().gathered(of_all(group, batch.rows, purpose), spares=spares)
        if spares:
            sizes = sharding.spared(batch.sizes)
            batch = replace(batch, rows=self.first_rows(batch.rows, sizes[batch.rank]), sizes=sizes)
        return TriedBatch(batch, of_all(group, batch.rows, purpose), batch.sizes)

    def draw_alike(self) -> None:
        """Seeds torch's generators, whose states the end of the trial restores."""
        torch.manual_seed(_SEED)

    def first_rows(self, batch: Any, count: int) -> Any:
        """Returns the first rows of a batch, as views of its tensors."""
        return rows(batch, 0, count)

    def keep(self, variables: Iterable[Any]) -> None:
        """Copies the values of those variables that have not been copied yet."""
        for value in keras_compat.stored_values(variables):
            if value is not None:
                self._keep(value)

    def restore(self) -> None:
        """Writes the copied values and gradients back."""
        with torch.no_grad():
            for value, before, gradient in self._kept.values():
                value.copy_(before)
                value.grad = gradient

    def ready(self, optimizer: Any, variables: Sequence[Any] | None) -> None:
        """Builds the optimizer if it is not built, and copies its variables' values."""
        if not optimizer.built and variables is not None:
            with self._model.replica_set.placement(), keras.name_scope(optimizer.name):
                optimizer.build(variables)
        self._open.enter_context(shards.whole(optimizer.variables))  # not one of the model's
        self.keep(optimizer.variables)

    def alone(
        self, step: Callable[[Any], Any], batch: Any, look: Callable[[], Any], change: float
    ) -> tuple[Any, Any]:
        """Takes the step in this thread, outside of replicas."""
        if change:
            self._change(change)
        with self._model.replica_set.placement():
            return step(batch), look()

    def divided(
        self, step: Callable[[Any], Any], batch: Any, look: Callable[[], Any]
    ) -> tuple[Any, Any]:
        """Takes the step on the replicas."""
        replicas = self._model.replica_set
        with replicas.placement():
            logs = replicas.steps(self._model).logging(step, step)([batch])
            return logs, look()

    def drawing(self, draw: Draw) -> AbstractContextManager[Any]:
        """Returns a context in which `draw` replaces the draws of torch's own functions."""
        return _Drawing(draw)

    def as_array(self, value: Any) -> Any:
        """Returns a tensor as a NumPy array of its own."""
        value = value.detach()
        if value.layout != torch.strided:
            value = value.to_dense()
        if value.dtype in (torch.bfloat16, torch.float16):
            value = value.float()
        return np.array(value.cpu())

    def _keep(self, value: torch.Tensor) -> None:
        if id(value) not in self._kept:
            gradient = value.grad
            kept = None if gradient is None else gradient.detach().clone()
            self._kept[id(value)] = (value, value.detach().clone(), kept)

    def _change(self, part: float) -> None:
        numbers = np.random.default_rng(0)
        with torch.no_grad():
            for variable in self._model.trainable_variables:
                value = keras_compat.stored_value(variable)
                if value is not None and value.is_floating_point():
                    change = numbers.uniform(-part, part, tuple(value.shape))
                    value.mul_(torch.as_tensor(1.0 + change, dtype=value.dtype).to(value.device))


@final
class _Drawing(TorchFunctionMode):
    """Calls a function in place of each random draw of torch, in the current thread."""

    def __init__(self, draw: Draw) -> None:
        super().__init__()
        self._draw = draw

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> torch.Tensor:
        kwargs = kwargs or {}
        if func in _LEAVING_OUT:
            return self._draw("dropout", lambda: func(*args, **kwargs), args[0])
        if func is torch.randperm:
            # One device permutes more rows than a replica, so both keep their order instead.
            drawn = func(*args, **kwargs)
            return self._draw("shuffle", lambda: drawn, torch.arange(len(drawn)).to(drawn))
        if func in _DRAWING:
            return self._draw(f"torch.{func.__name__}", lambda: func(*args, **kwargs), None)
        if func in _DRAWING_IN_PLACE:
            name = f"torch.Tensor.{func.__name__}"
            drawn = self._draw(name, lambda: func(*args, **kwargs).clone(), None)
            with torch.no_grad():
                return args[0].copy_(drawn)
        return func(*args, **kwargs)
