"""Sums gradients over the workers while the backward pass is still running.

The reducer supports only Keras's own `train_step` and `optimizer.apply`, which differentiate one
loss once and apply its gradients unchanged. The parameters are divided into buckets, the last
parameters first, which is the order of a backward pass. torch calls a hook when a gradient is
complete. The hook copies the gradient into its bucket and starts the all-reduce of a bucket that is
full; the last gradient starts the all-reduce of the last bucket.

All workers must start all collectives in the same order, or NCCL would wait forever. A worker on
which a gradient is missing starts the gradient's bucket later than the others. So if the backward
pass has other collectives, such as those of synchronized BatchNormalization, all buckets wait for
the end of the backward pass. The buckets do not wait if these collectives are only gathers of
sharded weights, because gathers and buckets use different process groups.

The first step shows which parameters have a gradient on any worker. Later steps have buckets for
these parameters only. The first step also shows which metrics it updates before its last gradient,
such as the mean of the loss. Later steps sum these metrics with the last bucket. Only the other
metrics, if there are any, need a message of their own.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, final

import keras
import torch

from kerasdist import keras_compat
from kerasdist.backends.torch import internals
from kerasdist.backends.torch.fit.gradients import Gradients, weighted_sum
from kerasdist.backends.torch.state import sharded_optimizers
from kerasdist.backends.torch.state.shards import Shard, shard_of
from kerasdist.backends.torch.state.variables import ReplicaScope
from kerasdist.backends.torch.workers.buckets import Buckets, GradientSum, shape_of
from kerasdist.backends.torch.workers.process_group import ProcessGroup
from kerasdist.training import numerics

# The all-reduce of the last bucket does not overlap with the backward pass, so it is small.
_LAST_BYTES = 2**20


@final
class GradientReducer:
    """Sums the gradients of one model's training steps over the workers.

    Also sums the metrics that a step updates before its last gradient is complete.
    """

    def __init__(
        self, model: Any, gradient_sum: GradientSum, sums: Mapping[int, keras.Variable]
    ) -> None:
        """Starts without buckets; `gradient_sum` sums the gradients that have no bucket.

        `sums` has the metrics' variables that are summed over the workers, by the variables' ids.
        """
        self._model = model
        self._sum = gradient_sum
        self._sums = sums
        # The variables of `sums` that have their final values before the backward pass completes
        # the step's last gradient. The first step shows which these are.
        self._early: list[keras.Variable] = []
        # Used only in the first step, and otherwise None: by variable id, the values that variables
        # of `sums` had when the last gradient was complete.
        self._seen: dict[int, torch.Tensor] | None = None
        self._buckets: HookedBuckets | None = None
        # The ids of parameters without a gradient on any worker; None before the first step.
        self._unreached: set[int] | None = None

    def begin(self, scope: ReplicaScope) -> None:
        """Starts a step of the replica with this scope.

        Makes new buckets if there are none, or if the old ones no longer fit the model.
        """
        optimizer = self._model.optimizer
        # An `apply` that is not Keras's own may change the gradients before they are summed, so
        # the gradients get no buckets.
        if not keras_compat.applies_directly(optimizer):
            self._drop()
            return
        weight = numerics.weight_of_gradients(optimizer, scope.weight)
        if self._buckets is not None and not self._buckets.begin(scope, weight):
            self._drop()
        if self._buckets is None:
            self._buckets = self._new_buckets(scope, weight)

    def sum_up(
        self,
        optimizer: keras.optimizers.Optimizer,
        gradients: Gradients,
        weight: float,
        variables: Sequence[keras.Variable],
    ) -> list[torch.Tensor | None] | None:
        """Returns the workers' weighted sums of gradients; None for a gradient that no worker has.

        For a sharded gradient the method returns this worker's shard of the sum. Returns None if
        there are no buckets for this optimizer's gradients.
        """
        buckets = self._buckets if optimizer is self._model.optimizer else None
        if buckets is None:
            return None
        totals, unserved = buckets.sums(gradients)
        if self._unreached is None:
            pairs = zip(variables, totals, strict=True)
            self._unreached = {id(variable) for variable, total in pairs if total is None}
            # Metrics are not sent with gradients in a smaller type, which would make them inexact.
            self._seen = None if self._sum.group.gradients_travel_as else buckets.early(self._sums)
            if self._unreached:
                self._drop()
        if unserved:
            theirs = [variables[i] for i in unserved]
            own = [gradients[i] for i in unserved]
            home = keras_compat.stored_value(theirs[0]).device
            rest = self._sum(optimizer, weighted_sum([own], [weight], theirs, home), theirs)
            for index, total in zip(unserved, rest, strict=True):
                totals[index] = total
            missed = {id(one) for one in theirs if not one.overwrite_with_gradient}
            if missed:
                self._unreached -= missed
                self._drop()  # the next step makes new buckets
        return totals

    def end(self, scope: ReplicaScope) -> dict[int, torch.Tensor]:
        """Ends a step; returns the sums of metrics that came with its gradients, by variable id.

        All workers must call this method. After the first step the workers exchange messages here,
        to agree on which metrics they will send with the gradients of later steps.
        """
        seen, self._seen = self._seen, None
        if seen is not None and self._sums:
            now, group = scope.state_mapping, self._sum.group
            kept = [float(key in seen and now.get(key) is seen[key]) for key in self._sums]
            [workers] = group.sums([torch.tensor(kept)])
            pairs = zip(self._sums.values(), workers.tolist(), strict=True)
            self._early = [variable for variable, count in pairs if count == group.size]
            self._drop()  # the next step makes buckets with room for `_early`
        return {} if self._buckets is None else self._buckets.sums_of_metrics()

    def _new_buckets(self, scope: ReplicaScope, weight: float) -> HookedBuckets | None:
        """Returns buckets for variables that may have a gradient; None if no variable may."""
        variables = self._model.trainable_weights
        served = [
            id(variable) not in (self._unreached or ())
            and not variable.overwrite_with_gradient
            and keras_compat.stored_value(variable).requires_grad
            for variable in variables
        ]
        if not any(served):
            return None
        self._sum.agree(variables, len(variables))
        shards = sharded_optimizers.of_gradients(self._model.optimizer, variables)
        return HookedBuckets(
            variables, served, self._sum.group, scope, weight, shards=shards, metrics=self._early
        )

    def _drop(self) -> None:
        if self._buckets is not None:
            self._buckets.close()
        self._buckets = None


@final
class HookedBuckets(Buckets):
    """Buckets that hooks fill during the backward pass, for some of an optimizer's variables."""

    def __init__(
        self,
        variables: Sequence[keras.Variable],
        served: Sequence[bool],
        group: ProcessGroup,
        scope: ReplicaScope,
        weight: float,
        *,
        shards: Mapping[int, Shard],
        metrics: Sequence[keras.Variable],
    ) -> None:
        """Makes the buckets, and registers a hook for each parameter for which `served` is True.

        `metrics` are variables that are summed with the last bucket.
        """
        self._variables = list(variables)  # used by `begin` to notice a replaced parameter
        self._parameters = {
            index: scope.leaf(variable)
            for index, (variable, is_served) in enumerate(zip(variables, served, strict=True))
            if is_served
        }
        super().__init__(
            {index: shape_of(variables[index]) for index in self._parameters},
            len(served),
            group,
            shards=shards,
            beside_gathers=any(map(shard_of, variables)),
            last_bytes=_LAST_BYTES,
            metrics=len(metrics),
        )
        self._metrics = metrics
        self._sent: list[torch.Tensor] = []  # the values of `metrics` that were sent
        self._unserved = [index for index, is_served in enumerate(served) if not is_served]
        self._weight, self._scope = weight, scope
        self._is_open = True
        itself: weakref.ref[HookedBuckets] = weakref.ref(self)
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(
                lambda parameter, index=index: _take(itself, index, parameter)
            )
            for index, parameter in self._parameters.items()
        ]

    def begin(self, scope: ReplicaScope, weight: float) -> bool:
        """Starts a step; returns whether the buckets still fit the model."""
        if self._is_open:  # an error ended the last step early
            return False
        for index, parameter in self._parameters.items():
            now = scope.leaf(self._variables[index])
            if now is not parameter or not parameter.requires_grad:
                return False
        self._weight, self._scope = weight, scope
        self._sent = []
        self.clear()
        self._is_open = True
        return True

    def take(self, index: int, parameter: torch.Tensor) -> None:
        """Puts a gradient into its bucket, and starts the sums of the buckets that are full."""
        if not self._is_open:
            return
        if index in self._arrived:
            raise RuntimeError(
                "Expected one backward pass in a training step. Received: a second gradient of "
                f"variable={self._variables[index].path!r}. Write a `train_step` of your own for "
                "several passes."
            )
        weights = self._scope.weights
        if weights is not None and not self._arrived:
            # After the backward pass, Keras's step reads only gradients. So from then on, reads of
            # weights need not gather them.
            internals.CALL_AFTER_BACKWARD.value(
                lambda: setattr(weights, "are_differentiated", True)
            )
        gradient = parameter.grad
        if weights is not None and gradient is not None:
            gradient = weights.own_gradient(gradient, self._variables[index])
        self.put(index, gradient, self._weight)
        parameter.grad = None  # frees torch's gradient, because the bucket has a copy
        if self._scope.sums_in_backward:
            return
        self.start_full()
        if len(self._arrived) == len(self._parameters) and not self._unserved:
            self.start_last()

    def sums(self, gradients: Gradients) -> tuple[list[torch.Tensor | None], list[int]]:
        """Returns the sums of the gradients that have a bucket.

        Also returns the indices of the variables without a bucket that have a gradient on any
        worker.
        """
        self._is_open = False
        totals, somewhere = self.finish(gradients, self._weight)
        return totals, [index for index in self._unserved if somewhere[index]]

    @torch.no_grad()
    def start_last(self, present: Sequence[bool] = ()) -> None:
        """Copies the metrics into the last bucket, and starts the bucket's sum over the workers."""
        self._sent = [self._scope.get_current_value(one) for one in self._metrics]
        if self._sent:
            internals.COPY_TO_EACH.value(self.metrics.unbind(), self._sent)
        super().start_last(present)

    def early(self, sums: Mapping[int, keras.Variable]) -> dict[int, torch.Tensor]:
        """Returns, by id, the values of `sums` that this step has written up to now.

        Leaves out values that the last bucket cannot sum, such as those of another type.
        """
        scope, kind = self._scope, (self.metrics.dtype, self.metrics.device, ())
        own = {key: scope.state_mapping[key] for key in sums if key in scope.written}
        return {key: one for key, one in own.items() if (one.dtype, one.device, one.shape) == kind}

    def sums_of_metrics(self) -> dict[int, torch.Tensor]:
        """Returns the sums of the metrics of this step, by the variables' ids."""
        if not self._sent:
            return {}
        for variable, sent in zip(self._metrics, self._sent, strict=True):
            if self._scope.get_current_value(variable) is not sent:
                raise RuntimeError(
                    "Expected each training step to update the same metrics before its last "
                    f"gradient. Received: a later update of variable={variable.path!r}. Write a "
                    "`train_step` of your own for such an update."
                )
        return dict(zip(map(id, self._metrics), self.metrics.unbind(), strict=True))

    def close(self) -> None:
        """Removes the hooks."""
        for hook in self._hooks:
            hook.remove()


def _take(buckets: weakref.ref[HookedBuckets], index: int, parameter: torch.Tensor) -> None:
    owner = buckets()
    if owner is not None:
        owner.take(index, parameter)
