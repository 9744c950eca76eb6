"""Which gradients torch's reducer sums while the backward pass runs, and which are left.

Only Keras's own `train_step` is served: it differentiates one loss once, and its gradients are
those of the parameters. The first step shows on which parameters that loss depends. The weight of a
worker's gradients is in its loss already, so that a bucket needs no pass but the sum's.

Parameters on which no worker's loss depended stay outside. In a model that has such ones, workers
ask each other in every step whether that has changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.distributed as dist

from kerasdist import keras_seam
from kerasdist.backends.torch.workers.gradients import GradientSum
from kerasdist.backends.torch.workers.reducer import Reducer
from kerasdist.training import numerics

# A model whose steps depend on other parameters again and again is not for a reducer.
_MOST_REDUCERS = 10


@final
@dataclass(frozen=True, eq=False)
class Plan:
    """What the reducer is for.

    Attributes:
        reducer: The reducer.
        variables: The optimizer's variables, so that their ids stay theirs.
        served: The ids of those whose gradients the reducer sums.
    """

    reducer: Reducer
    variables: Sequence[Any]
    served: frozenset[int]

    @property
    def holds(self) -> bool:
        """Whether the variables that it serves are as they were."""
        return self.reducer.serves(
            keras_seam.stored_value(one) for one in self.variables if id(one) in self.served
        )


@final
class Overlap:
    """Sums the gradients of one model's training steps."""

    def __init__(self, model: Any, gradient_sum: GradientSum) -> None:
        """Starts without a reducer.

        Args:
            model: A model with Keras's own `train_step`.
            gradient_sum: Sums what the reducer does not.
        """
        self._model = model
        self._sum = gradient_sum
        self._plan: Plan | None = None
        self._made = 0
        self._running = False

    def begin(self) -> None:
        """Starts a step."""
        if self._running or (self._plan is not None and not self._plan.holds):
            self._drop_plan()  # an error has ended the last step, or a layer was frozen since
        self._running = self._plan is not None
        if self._plan is not None:
            self._plan.reducer.begin()

    def serves(self, optimizer: Any) -> bool:
        """Returns whether this step's gradients for an optimizer are summed as they come.

        Args:
            optimizer: A Keras optimizer.
        """
        return self._running and optimizer is self._model.optimizer

    def marked(self, loss: torch.Tensor) -> torch.Tensor:
        """Returns what is to be differentiated for a loss, so that the reducer can serve it.

        Args:
            loss: This step's loss, scaled and weighed.
        """
        return loss if self._plan is None else self._plan.reducer.marked(loss)

    def sum_up(
        self,
        optimizer: Any,
        gradients: Sequence[torch.Tensor | None],
        variables: Sequence[Any],
        weight: float,
    ) -> list[torch.Tensor | None]:
        """Returns the weighted sum of the workers' gradients; None where no worker has one.

        Args:
            optimizer: The optimizer that is to apply them.
            gradients: This worker's gradients; None where there is none.
            variables: The variables they belong to.
            weight: This worker's weight, if its loss has not got it.
        """
        plan = self._plan
        if plan is None or not self.serves(optimizer):
            summed = self._sum(gradients, variables, weight)
            if plan is None and optimizer is self._model.optimizer:
                self._plan = self._new_plan(optimizer, summed, variables)
            return summed
        self._running = False
        nowhere = plan.reducer.finish()
        summed: list[torch.Tensor | None] = [*gradients]
        for index, variable in enumerate(variables):
            if id(variable) in plan.served:
                parameter = keras_seam.stored_value(variable)
                summed[index] = None if id(parameter) in nowhere else parameter.grad
        left = [i for i, variable in enumerate(variables) if id(variable) not in plan.served]
        if left and self._any_worker_has([gradients[index] for index in left]):
            # These were not divided on their way.
            weight = 1.0 / plan.reducer.factor
            rest = self._sum([gradients[i] for i in left], [variables[i] for i in left], weight)
            for index, total in zip(left, rest, strict=True):
                summed[index] = total
            self._drop_plan()  # the next step shows anew what the reducer is for
        return summed

    def _any_worker_has(self, gradients: Sequence[torch.Tensor | None]) -> bool:
        # In host memory: nobody has to wait for a GPU to read it.
        count = torch.tensor([float(any(gradient is not None for gradient in gradients))])
        dist.all_reduce(count)
        return bool(count)

    def _new_plan(
        self, optimizer: Any, summed: Sequence[torch.Tensor | None], variables: Sequence[Any]
    ) -> Plan | None:
        """The plan for steps like the one that led to these gradients."""
        served = [
            variable
            for variable, gradient in zip(variables, summed, strict=True)
            if gradient is not None
            and not variable.overwrite_with_gradient
            and keras_seam.stored_value(variable).requires_grad
        ]
        if not served or self._made == _MOST_REDUCERS:
            return None
        self._made += 1
        # A loss that is scaled already, as float16 wants it, must not get larger still.
        scales = numerics.is_weighed_by_loss(optimizer) or optimizer.loss_scale_factor is not None
        compression = self._sum.compression
        reducer = Reducer(
            [keras_seam.stored_value(variable) for variable in served],
            workers=dist.get_world_size(),
            compression=None if compression.is_none and not scales else compression,
            bucket_bytes=self._sum.options.bytes_per_pack,
        )
        return Plan(reducer, list(variables), frozenset(map(id, served)))

    def _drop_plan(self) -> None:
        if self._plan is not None:
            self._plan.reducer.close()
        self._plan = None
