"""The facade: what every strategy offers, with ``tf.distribute``'s names and meaning."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any, NoReturn

from kerasdist import context
from kerasdist.backends.base import ReplicaOptions, ReplicaSet
from kerasdist.replica_context import ReplicaContext


class Strategy:
    """Devices, one replica of the model on each, and how they train together.

    Not made directly: see `kerasdist.MirroredStrategy` and `kerasdist.OneDeviceStrategy`. The
    meaning of every member is that of ``tf.distribute.Strategy``.
    """

    def __init__(self, replica_set: ReplicaSet | None) -> None:
        """Makes a strategy over a replica set.

        Args:
            replica_set: The devices and how to compute on them; None for the default strategy,
                under which plain Keras runs.
        """
        self._replica_set = replica_set

    @property
    def num_replicas_in_sync(self) -> int:
        """How many replicas gradients are combined over."""
        return 1 if self._replica_set is None else self._replica_set.num_replicas

    @property
    def replica_set(self) -> ReplicaSet | None:
        """The devices and how to compute on them, None for the default strategy."""
        return self._replica_set

    @property
    def options(self) -> ReplicaOptions:
        """How the replicas compute."""
        return ReplicaOptions() if self._replica_set is None else self._replica_set.options

    @contextlib.contextmanager
    def scope(self) -> Generator[Strategy]:
        """Opens this strategy's scope: models, optimizers and metrics made inside belong to it.

        Example::

            strategy = kd.MirroredStrategy()
            with strategy.scope():
                model = keras.Sequential([keras.layers.Dense(1)])
                model.compile(optimizer="adam", loss="mse")
            model.fit(x, y, batch_size=256)

        Yields:
            The strategy.

        Raises:
            ScopeError: If another strategy's scope is open in this thread.
        """
        with contextlib.ExitStack() as stack:
            stack.enter_context(context.strategy_scope(self))
            if self._replica_set is not None:
                stack.enter_context(self._replica_set.placement())
            yield self

    def sole_replica_context(self) -> ReplicaContext:
        """Returns the context of code outside of every replica, where there is but one."""
        return ReplicaContext(strategy=self, replica_id_in_sync_group=0, num_replicas_in_sync=1)

    def __str__(self) -> str:
        devices = [] if self._replica_set is None else [str(d) for d in self._replica_set.devices]
        return f"{type(self).__name__}({devices})"

    def __repr__(self) -> str:
        return str(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Strategy:
        # As in tf.distribute: a structure that holds a strategy may be copied, the strategy is not.
        return self

    def __copy__(self) -> NoReturn:
        raise RuntimeError(
            "Expected one object a strategy: it owns devices and threads. Received: "
            "copy.copy(strategy). Use the strategy itself, or make another one."
        )
