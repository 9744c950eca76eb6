"""Keras's Adam on the CPU, in one pass over the memory.

Keras's own makes ten passes, and new tensors in most of them; torch's kernel reads and writes each
number once. It serves the Adam and AdamW that Keras ships, where replicas' gradients are applied;
weight decay, clipping, averages and all else that an optimizer does stays Keras's code.

The two write the rule in other ways. With t steps taken, Keras subtracts ``alpha m / (sqrt(v) +
epsilon)`` where ``alpha = rate sqrt(1 - beta_2^t) / (1 - beta_1^t)``; torch divides m and v by
those factors one by one, which gives epsilon another weight. After endless steps the factors are 1:
so torch is told that, and gets alpha for a rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, final

import numpy as np
import torch

from kerasdist import context, keras_seam

_ENDLESS = torch.tensor(math.inf)


@cache
def install() -> None:
    """Puts the hook into Keras, once in a process."""
    keras_seam.install_torch_adam(_update)


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
    # The kernel leaves that out, and autograd asks for it, as we do for what replicas hold.
    torch.autograd.graph.increment_version(operands.written)


@final
@dataclass(frozen=True, eq=False)
class _Operands:
    """What the kernel works on.

    Attributes:
        values: The variables' values.
        gradients: As many gradients.
        momentums: As many momentums.
        velocities: As many velocities.
        highest: The highest velocities, if they are kept, else none.
    """

    values: list[torch.Tensor]
    gradients: list[torch.Tensor]
    momentums: list[torch.Tensor]
    velocities: list[torch.Tensor]
    highest: list[torch.Tensor]

    @property
    def written(self) -> list[torch.Tensor]:
        """What the kernel writes to."""
        return [*self.values, *self.momentums, *self.velocities, *self.highest]


def _operands(
    optimizer: Any, gradients: Sequence[torch.Tensor], variables: Sequence[Any]
) -> _Operands | None:
    """Returns the operands, None if they are not all as the kernel takes for granted."""
    values = [variable.value for variable in variables]
    if any(
        gradient.layout is not torch.strided or gradient.shape != value.shape
        for gradient, value in zip(gradients, values, strict=True)
    ):
        return None
    momentums, velocities, highest = (
        [slot.value for slot in slots] for slots in keras_seam.adam_slots(optimizer, variables)
    )
    dense = [gradient.contiguous() for gradient in gradients]
    operands = _Operands(values, dense, momentums, velocities, highest)
    fits = all(
        tensor.is_cpu and tensor.dtype is torch.float32 and tensor.is_contiguous()
        for tensor in (*dense, *operands.written)
    )
    return operands if fits else None


def _is_plain(optimizer: Any) -> bool:
    """Whether no user code is in the rule."""
    numbers = (optimizer.beta_1, optimizer.beta_2, optimizer.epsilon)
    return keras_seam.is_kerass_own(type(optimizer)) and all(
        isinstance(number, float) for number in numbers
    )


def _alpha(optimizer: Any, learning_rate: Any) -> float:
    """The rate with both corrections, in float32 and in Keras's order of operations."""
    one = np.float32(1)
    step = np.float32(_number(optimizer.iterations) + 1)
    unseen_1 = one - np.float32(optimizer.beta_1) ** step
    unseen_2 = one - np.float32(optimizer.beta_2) ** step
    return float(np.float32(_number(learning_rate)) * np.sqrt(unseen_2) / unseen_1)


def _number(scalar: Any) -> float:
    return keras_seam.ops.convert_to_tensor(scalar).item()
