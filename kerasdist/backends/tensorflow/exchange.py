"""Where the replicas of a step meet: all stop, one computes for all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import tensorflow as tf

Result = TypeVar("Result")


@dataclass(frozen=True)
class Exchange:
    """The meeting place of one run of the replicas.

    Attributes:
        engine: The strategy that runs them.
        given: What each replica laid down, by its number.
    """

    engine: tf.distribute.Strategy
    given: list[Sequence[Any]]

    @classmethod
    def of(cls, engine: tf.distribute.Strategy) -> Exchange:
        """Makes an empty one.

        Args:
            engine: The strategy that will run the replicas.
        """
        return cls(engine, [() for _ in range(engine.num_replicas_in_sync)])

    def combine(
        self,
        replica: int,
        given: Sequence[Any],
        function: Callable[[list[tuple[Any, ...]]], Result],
    ) -> Result:
        """Computes one result from what all replicas give; all of them must call it.

        Args:
            replica: The number of the replica that gives.
            given: What it gives.
            function: Takes a tuple for each thing given, with every replica's in it. It runs once,
                in cross-replica context.

        Returns:
            What `function` returned, the same for all.
        """
        # merge_call would group the arguments by itself, but values that are one Python object in
        # all replicas would lose their group.
        self.given[replica] = given

        def merged(engine: tf.distribute.Strategy) -> Result:
            # Without a device, operations would go to the first GPU of the machine.
            with tf.device(engine.extended.worker_devices[0]):
                return function(list(zip(*self.given, strict=True)))

        context = tf.distribute.get_replica_context()
        return context.merge_call(tf.autograph.experimental.do_not_convert(merged))
