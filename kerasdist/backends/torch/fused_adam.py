"""Keras's Adam on the CPU by torch's fused kernel, in one pass over memory.

Keras's own code makes ten passes, most of them with new tensors; the kernel reads and writes each
number once. It replaces the update rule of the Adam and AdamW that Keras ships, where replicas'
gradients are applied. Weight decay, clipping and weight averages remain Keras's code.

The two apply epsilon differently. At step t Keras subtracts ``alpha m / (sqrt(v) + epsilon)`` where
``alpha = rate sqrt(1 - beta_2^t) / (1 - beta_1^t)``; torch divides m and v by those factors
separately, which gives epsilon another weight. As t goes to infinity the factors become 1. So the
kernel gets an infinite t, and alpha as its learning rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, final

import numpy as np
import torch

from kerasdist import context, keras_compat

_ENDLESS = torch.tensor(math.inf)


@cache
def install() -> None:
    """Puts the hook into Keras, once in a process."""
    keras_compat.install_torch_adam(_update)


def _update(
    original: Callable[..., None],
    optimizer: Any,
    gradients: Sequence[torch.Tensor],
    variables: Sequence[Any],
    learning_rate: Any,
) -> None:
    serves = context.enclosing_replica() is not None and _is_plain(optimizer)
    operands = _operands(optimizer, gradients, variables) if serves else None
    if operands is None:
        original(optimizer, gradients, variables, learning_rate)
        return
    torch._fused_adam_(
        operands.values,
        operands.gradients,
        operands.momentums,
        operands.velocities,
        operands.highest,
        [_ENDLESS] * len(variables),
        lr=_alpha(optimizer, learning_rate),
        beta1=optimizer.beta_1,
        beta2=optimizer.beta_2,
        weight_decay=0.0,
        eps=optimizer.epsilon,
        amsgrad=optimizer.amsgrad,
        maximize=False,
    )
    # The kernel does not count versions, by which autograd, `Kept` and `Alias` detect changes.
    torch.autograd.graph.increment_version(operands.written)


@final
@dataclass(frozen=True, eq=False)
class _Operands:
    """The tensors that the kernel reads and writes.

    Attributes:
        values: The variables' values.
        gradients: Their gradients.
        momentums: Their momentums.
        velocities: Their velocities.
        highest: The maximums of their velocities with ``amsgrad=True``, else an empty list.
    """

    values: list[torch.Tensor]
    gradients: list[torch.Tensor]
    momentums: list[torch.Tensor]
    velocities: list[torch.Tensor]
    highest: list[torch.Tensor]

    @property
    def written(self) -> list[torch.Tensor]:
        """The tensors that the kernel writes."""
        return [*self.values, *self.momentums, *self.velocities, *self.highest]


def _operands(
    optimizer: Any, gradients: Sequence[torch.Tensor], variables: Sequence[Any]
) -> _Operands | None:
    """Returns the operands; None unless all are dense, contiguous, float32 and on the CPU."""
    values = [variable.value for variable in variables]
    if any(
        gradient.layout is not torch.strided or gradient.shape != value.shape
        for gradient, value in zip(gradients, values, strict=True)
    ):
        return None
    momentums, velocities, highest = (
        [slot.value for slot in slots] for slots in keras_compat.adam_slots(optimizer, variables)
    )
    dense = [gradient.contiguous() for gradient in gradients]
    operands = _Operands(values, dense, momentums, velocities, highest)
    fits = all(
        tensor.is_cpu and tensor.dtype is torch.float32 and tensor.is_contiguous()
        for tensor in (*dense, *operands.written)
    )
    return operands if fits else None


def _is_plain(optimizer: Any) -> bool:
    """Whether the optimizer's class is Keras's own, and its hyperparameters are plain floats."""
    numbers = (optimizer.beta_1, optimizer.beta_2, optimizer.epsilon)
    return keras_compat.is_builtin(type(optimizer)) and all(
        isinstance(number, float) for number in numbers
    )


def _alpha(optimizer: Any, learning_rate: Any) -> float:
    """Returns the learning rate with both bias corrections, computed as Keras does in float32."""
    one = np.float32(1)
    step = np.float32(_number(optimizer.iterations) + 1)
    unseen_1 = one - np.float32(optimizer.beta_1) ** step
    unseen_2 = one - np.float32(optimizer.beta_2) ** step
    return float(np.float32(_number(learning_rate)) * np.sqrt(unseen_2) / unseen_1)


def _number(scalar: Any) -> float:
    return keras_compat.ops.convert_to_tensor(scalar).item()
