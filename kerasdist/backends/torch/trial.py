"""A training step tried on one device and on the replicas, on PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, final

import keras
import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from kerasdist import keras_seam
from kerasdist.backends.torch.draws import RandomState
from kerasdist.backends.trial import Draw, Trial
from kerasdist.input.dividing import rows

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

# Of the draws of all workers in a trial.
_SEED = 0


class TorchTrial(Trial):
    """Writes into the variables themselves, and puts back what was in them."""

    def __init__(self, model: Any) -> None:
        """Prepares a trial.

        Args:
            model: A model with a `TorchTrainer`, built.
        """
        super().__init__(model)
        # By id: the tensor, what was in it, and its gradient.
        self._kept: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]] = {}
        self._random = RandomState()

    def __enter__(self) -> TorchTrial:
        self._random = RandomState()
        for buffer in self._model.buffers():
            self._keep(buffer)
        for parameter in self._model.parameters():
            self._keep(parameter)
        return self

    def __exit__(self, *error: object) -> None:
        self.restore()
        self._kept.clear()
        self._random.restore()

    def draw_alike(self) -> None:
        """Seeds torch's generators; at the end of the trial they are as they were."""
        torch.manual_seed(_SEED)

    def first_rows(self, batch: Any, count: int) -> Any:
        """Returns views of the tensors."""
        return rows(batch, 0, count)

    def keep(self, variables: Iterable[Any]) -> None:
        """Copies the values of variables, those that it does not know yet."""
        for value in keras_seam.stored_values(variables):
            if value is not None:
                self._keep(value)

    def restore(self) -> None:
        """Copies the values back."""
        with torch.no_grad():
            for value, before, gradient in self._kept.values():
                value.copy_(before)
                value.grad = gradient

    def ready(self, optimizer: Any, variables: Sequence[Any] | None) -> None:
        """Builds the optimizer, if it is not built; its variables are as any others."""
        if not optimizer.built and variables is not None:
            with self._model.replica_set.placement(), keras.name_scope(optimizer.name):
                optimizer.build(variables)
        self.keep(optimizer.variables)

    def alone(
        self, step: Callable[[Any], Any], batch: Any, look: Callable[[], Any], change: float
    ) -> tuple[Any, Any]:
        """Takes the step in this thread, with the variables themselves."""
        if change:
            self._change(change)
        with self._model.replica_set.placement():
            return step(batch), look()

    def divided(
        self, step: Callable[[Any], Any], batch: Any, look: Callable[[], Any]
    ) -> tuple[Any, Any]:
        """Takes the step in the replicas' threads."""
        replicas = self._model.replica_set
        with replicas.placement():
            logs = replicas.steps(self._model).logging(step, step)([batch])
            return logs, look()

    def drawing(self, draw: Draw) -> AbstractContextManager[Any]:
        """Steps in where torch's own functions draw."""
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
                value = keras_seam.stored_value(variable)
                if value is not None and value.is_floating_point():
                    change = numbers.uniform(-part, part, tuple(value.shape))
                    value.mul_(torch.as_tensor(1.0 + change, dtype=value.dtype).to(value.device))


@final
class _Drawing(TorchFunctionMode):
    """Calls a function where torch draws, in one thread."""

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
            # Of as many rows as the caller has: in order, on one device and on replicas.
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
