"""Callbacks as in Horovod: they broadcast variables, average logs and warm up the learning rate."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, final

import keras

from kerasdist import keras_compat
from kerasdist.backends.base.model_trainer import replicas_of
from kerasdist.errors import UnsupportedError
from kerasdist.job.job import current_job
from kerasdist.keras_compat import ops


@final
class BroadcastGlobalVariables(keras.callbacks.Callback):
    """Copies the chief's weights and optimizer state to all other workers when `fit` begins.

    New variables are equal on all workers even without this callback. Use this callback for
    variables that changed afterwards on the chief only, such as weights that only the chief has
    loaded.

    Example::

        model.fit(x, y, callbacks=[kd.callbacks.BroadcastGlobalVariables()])

    Source: Horovod's ``BroadcastGlobalVariablesCallback``.
    """

    def __init__(self, root_rank: int = 0) -> None:
        """Makes the callback.

        Args:
            root_rank: The worker whose variables are sent; only 0, the chief, is possible.

        Raises:
            ValueError: If `root_rank` is not 0.
        """
        super().__init__()
        if root_rank != 0:
            raise ValueError(
                "Expected root_rank=0, as the chief sends its variables to all workers. Received: "
                f"root_rank={root_rank!r}. Load the variables on worker 0."
            )

    def on_train_begin(self, logs: dict[str, object] | None = None) -> None:
        """Sends the variables. All workers must call this method.

        Raises:
            UnsupportedError: If the workers divide the model's state (``sharding=``).
        """
        replicas = replicas_of(self.model)
        if replicas is not None and replicas.divides_state:
            raise UnsupportedError(
                "Expected a strategy whose workers hold all variables. Received: "
                "BroadcastGlobalVariables, with sharding="
                f"{replicas.options.sharding!r:.200}. The chief holds only its own part "
                "of each variable: load the weights on all workers."
            )
        broadcast(self.model)


def broadcast(model: Any, variables: Sequence[keras.Variable] | None = None) -> None:
    """Gives all workers the chief's values of `variables`.

    If `variables` is None, all variables of the model and its optimizers are sent. All workers must
    call this function.
    """
    replicas = replicas_of(model)
    if replicas is not None and replicas.job is not None:
        if variables is None:
            optimizers = keras_compat.optimizers_of(model)
            variables = [*model.variables, *(each for one in optimizers for each in one.variables)]
        replicas.initial_broadcast.ensure()
        replicas.equalize(variables)


_REDUCTIONS = {
    "mean": lambda values: sum(values) / len(values),
    "sum": sum,
    "min": min,
    "max": max,
    "chief": lambda values: values[0],
}


@final
class MetricsReduction(keras.callbacks.Callback):
    """Reduces the logs of an epoch over the workers, before later callbacks see them.

    The values that `fit` itself reports are computed from the global batch. So they are equal on
    all workers, and stay unchanged. Use this callback for values that a worker's own code adds to
    the logs: put it after the callback that adds them, and before EarlyStopping, ReduceLROnPlateau
    or ModelCheckpoint.

    Example::

        model.fit(x, y, callbacks=[kd.callbacks.MetricsReduction()])

    Source: Horovod's ``MetricAverageCallback``.
    """

    def __init__(self, reductions: Mapping[str, str] | None = None) -> None:
        """Makes the callback.

        Args:
            reductions: For the name of each log, how to reduce the log: ``"mean"``, ``"sum"``,
                ``"min"``, ``"max"``, or ``"chief"``, which takes the chief's value. Logs that are
                not named here are averaged.

        Raises:
            ValueError: If a reduction is none of these five.
        """
        super().__init__()
        self._reductions = dict(reductions or {})
        unknown = {name: how for name, how in self._reductions.items() if how not in _REDUCTIONS}
        if unknown:
            raise ValueError(
                f"Expected one of {sorted(_REDUCTIONS)} for each log. Received: "
                f"reductions={unknown!r}."
            )

    def on_epoch_end(self, epoch: int, logs: dict[str, object] | None = None) -> None:
        """Reduces the logs in place. All workers must pass logs of the same names."""
        job = current_job()
        if job is None or not logs:
            return
        own = {name: value for name, value in logs.items() if isinstance(value, int | float)}
        label = f"logs of epoch {epoch + 1}: {sorted(own)}"
        logs.update(job.choose(label, own, self._reduce))

    def _reduce(self, everyone: Sequence[dict[str, float]]) -> dict[str, float]:
        """Returns the reduced values of those logs that differ between workers."""
        reduced: dict[str, float] = {}
        for name in everyone[0]:
            values = [theirs[name] for theirs in everyone]
            if any(value != values[0] for value in values):
                reduced[name] = _REDUCTIONS[self._reductions.get(name, "mean")](values)
        return reduced


@final
class LearningRateWarmup(keras.callbacks.Callback):
    """Lets the learning rate grow in the first epochs, from `start` to `target`.

    Use this callback if you have multiplied both the learning rate and the global batch size by the
    number of replicas. The callback sets the rate before every batch, in equal steps; after the
    warm-up it no longer changes the rate.

    Example::

        warmup = kd.callbacks.LearningRateWarmup(epochs=2)
        model.fit(x, y, epochs=3, callbacks=[warmup])

    Source: Goyal et al., "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour", 2017,
    section 2.2; Horovod's ``LearningRateWarmupCallback``.
    """

    def __init__(
        self,
        target: float | None = None,
        *,
        epochs: float = 5,
        start: float | None = None,
        steps_per_epoch: int | None = None,
    ) -> None:
        """Makes the callback.

        Args:
            target: The learning rate at the end of the warm-up; None for the optimizer's rate.
            epochs: The length of the warm-up in epochs, not necessarily an integer.
            start: The learning rate of the first batch; None: `target` divided by the number of
                replicas.
            steps_per_epoch: The number of batches of an epoch; None if `fit` knows this number.

        Raises:
            ValueError: If `epochs` is negative.
        """
        super().__init__()
        if epochs < 0:
            raise ValueError(f"Expected epochs of at least 0. Received: {epochs=}.")
        self._given = target, start
        self._epochs = epochs
        self._steps_per_epoch = steps_per_epoch
        self._epoch = 0
        self._rates = (0.0, 0.0)
        self._warm_up_steps = 0

    def on_train_begin(self, logs: dict[str, object] | None = None) -> None:
        """Computes the first and the last learning rate, and the length of the warm-up."""
        steps = self._steps_per_epoch or (self.params or {}).get("steps")
        if steps is None:
            raise ValueError(
                "Expected the number of batches of an epoch. Received: steps_per_epoch=None, and "
                "data of unknown length. Give it: LearningRateWarmup(steps_per_epoch=...)."
            )
        target, start = self._given
        if target is None:
            target = float(ops.convert_to_numpy(self._optimizer.learning_rate))
        replicas = replicas_of(self.model)
        count = 1 if replicas is None else replicas.num_replicas
        self._rates = (target / count if start is None else start), target
        self._steps_per_epoch = steps
        self._warm_up_steps = math.ceil(self._epochs * steps)

    def on_epoch_begin(self, epoch: int, logs: dict[str, object] | None = None) -> None:
        """Stores the number of the epoch, on which the learning rate depends."""
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: dict[str, object] | None = None) -> None:
        """Sets the learning rate of a batch."""
        assert self._steps_per_epoch is not None  # `on_train_begin` has set it
        step = self._epoch * self._steps_per_epoch + batch
        if step > self._warm_up_steps:
            return
        start, target = self._rates
        part = step / self._warm_up_steps if self._warm_up_steps else 1.0
        self._optimizer.learning_rate = start + part * (target - start)

    @property
    def _optimizer(self) -> Any:
        model: Any = self.model
        return model.optimizer
