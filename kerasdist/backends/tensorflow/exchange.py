"""Where the replicas of a step meet: all stop, one computes for all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import tensorflow as tf

from kerasdist.backends.tensorflow.groups import Group
from kerasdist.errors import ReplicaError

Result = TypeVar("Result")


@dataclass(frozen=True)
class Exchange:
    """The meeting place of one run of the replicas.

    Attributes:
        group: All replicas; those of this process meet.
        given: What each of them laid down, in their order: the name of the call, and what it gives.
    """

    group: Group
    given: list[tuple[str, Sequence[Any]] | None]

    @classmethod
    def of(cls, group: Group) -> Exchange:
        """Makes an empty one.

        Args:
            group: All replicas.
        """
        return cls(group, [None for _ in group.local])

    def combine(
        self,
        replica: int,
        call: str,
        given: Sequence[Any],
        function: Callable[[list[tuple[Any, ...]]], Result],
    ) -> Result:
        """Computes one result from what all replicas give; all of them must call it.

        Args:
            replica: The number of the replica that gives, of all replicas.
            call: What the replica does here; all must do the same.
            given: What it gives.
            function: Takes a tuple for each thing given, with that of every replica of this process
                in it. It runs once, in cross-replica context.

        Returns:
            What `function` returned, the same for all but for distributed values, of which each
            replica gets its component.

        Raises:
            ReplicaError: If the replicas do not all make the same call.
        """
        # merge_call would group the arguments by itself, but values that are one Python object in
        # all replicas would lose their group.
        self.given[replica - self.group.local.start] = call, given

        def merged(engine: tf.distribute.Strategy) -> Result:
            columns = self._collected()
            # Without a device, operations would go to the first GPU of the machine.
            with tf.device(engine.extended.worker_devices[0]):
                return function(columns)

        context = tf.distribute.get_replica_context()
        return context.merge_call(tf.autograph.experimental.do_not_convert(merged))

    def _collected(self) -> list[tuple[Any, ...]]:
        laid_down = list(self.given)
        self.given[:] = [None] * len(laid_down)
        calls = ["another call" if one is None else one[0] for one in laid_down]
        rows = [() if one is None else one[1] for one in laid_down]
        if len(set(calls)) > 1 or len({len(row) for row in rows}) > 1:
            said = [f"{call} of {len(row)}" for call, row in zip(calls, rows, strict=True)]
            raise ReplicaError(
                "Expected the same call from every replica, with as many tensors. Received: "
                f"calls={said}, replica 0's first. Call collectives in the same order in all of "
                "them, never under a condition that differs."
            )
        return list(zip(*rows, strict=True))
