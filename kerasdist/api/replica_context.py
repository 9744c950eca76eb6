"""What a replica knows in a step: its number, its rows, and its collectives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from kerasdist.api.options import CommunicationOptions, ReduceOp
from kerasdist.backends.base.checks import axis_of_rows, check_communication
from kerasdist.backends.base.collectives import Collectives, SoleReplica, communication_of
from kerasdist.core.context import ReplicaLike, current, replica_context_in_force, replica_scope
from kerasdist.core.earlier_names import EarlierNames
from kerasdist.core.structures import Arguments, flatten, map_leaves, pack
from kerasdist.errors import ScopeError


@dataclass(frozen=True)
class LocalBatch:
    """Which part of the global batch a replica holds, in a step of `fit`, `evaluate` or `predict`.

    Attributes:
        size: Number of examples of this replica. It is an int, or an int32 scalar tensor if the
            number is not known before the step runs.
        total: Number of examples in the global batch, of the same type as `size`.
        weight: ``size / total``, a float or a float32 scalar tensor; 0 for a replica without
            examples.
    """

    size: Any
    total: Any
    weight: Any

    def note_in(self, error: Exception) -> None:
        """Adds a note to an error about shapes: how many rows of the batch this replica has.

        If the replica has all rows of the batch, the error gets no note.
        """
        is_known = isinstance(self.size, int) and isinstance(self.total, int)
        of_shapes = ("shape", "dimension", "size of tensor")
        if is_known and self.size == self.total:
            return
        if not any(word in str(error).lower() for word in of_shapes):
            return
        rows = (
            f"{self.size} of the batch's {self.total} rows" if is_known else "a part of the batch"
        )
        error.add_note(
            f"The step runs once per replica, and this replica has {rows}. If the step "
            "makes arrays of a fixed batch size, let it take the size from its batch: "
            "keras.ops.shape(x)[0]."
        )


@dataclass(frozen=True, eq=False)
class ReplicaContext(ReplicaLike, EarlierNames):
    """The context of one replica in a step: its number, and collectives with other replicas.

    `kerasdist.get_replica_context` returns this context in the function that `Strategy.run` calls,
    and in everything that this function calls. The object is also a context manager: in its
    ``with`` block, `get_replica_context` returns this object.

    Example::

        def on_replica(batch):
            replica = kd.get_replica_context()
            return replica.all_reduce("SUM", keras.ops.sum(batch))


        dataset = strategy.distribute_dataset([x[:16], x[16:32]])
        totals = strategy.run(on_replica, args=(next(iter(dataset)),))

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/ReplicaContext

    Attributes:
        strategy: The strategy that runs the step.
        replica_id_in_sync_group: This replica's number, counted from 0. It is an int; on JAX it is
            an int32 scalar, whose value is known only when the program runs.
        num_replicas_in_sync: How many replicas take part in the step.
    """

    # Only kerasdist itself uses the following fields; they are not public.
    collectives: Collectives = field(default_factory=SoleReplica, repr=False)
    local_batch: LocalBatch | None = field(default=None, repr=False)
    # The contexts that `__enter__` has entered and `__exit__` has not left yet.
    _entered: list[AbstractContextManager[None]] = field(default_factory=list, repr=False)

    @property
    def devices(self) -> tuple[str, ...]:
        """The names of the devices on which this replica computes."""
        replica_set, number = self.strategy.replica_set, self.replica_id_in_sync_group
        if not isinstance(number, int) or replica_set is None:
            return ()
        here = replica_set.local_replicas
        first = (number - here.start) * replica_set.options.devices_per_replica
        return (str(replica_set.devices[first]),) if number in here else ()

    def merge_call(
        self,
        merge_fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Calls a function once for all replicas, in cross-replica context.

        All replicas must call this method, with the same function.

        Args:
            merge_fn: The function. It gets the strategy, and then each argument as a distributed
                value with one component from each replica.
            args: This replica's arguments.
            kwargs: This replica's keyword arguments.

        Returns:
            The function's result, with this replica's component in place of each distributed value.

        Raises:
            ScopeError: If this is not the context of the replica that runs the call.
            ReplicaError: If the replicas do not all make the same call.
        """
        self._require_in_force("merge_call")
        return self.collectives.merge_call(self.strategy, merge_fn, Arguments.of(args, kwargs))

    def all_reduce(
        self, reduce_op: ReduceOp | str, value: Any, options: CommunicationOptions | None = None
    ) -> Any:
        """Returns the sum or mean of the replicas' values; the mean of integers is a float.

        All replicas must call this method, in the same order. The gradient of a sum is the sum of
        the replicas' gradients, and the gradient of a mean is their mean.

        Args:
            reduce_op: ``"SUM"`` or ``"MEAN"``.
            value: A tensor, or nested lists, tuples and dicts of tensors, of the same shapes and
                types on all replicas. On TensorFlow also ``tf.IndexedSlices``, whose sum is not
                differentiable.
            options: How to communicate.

        Returns:
            The same structure with reduced tensors, on every replica.

        Raises:
            ScopeError: If this is not the context of the replica that runs the call.
            ReplicaError: If the replicas do not all make the same call.
        """
        self._require_in_force("all_reduce")
        op = ReduceOp.of(reduce_op)
        leaves = flatten(value)
        sums = self.collectives.all_sum(leaves, communication_of(options))
        if op is ReduceOp.MEAN:
            sums = [self.collectives.mean_of_sum(one, self.num_replicas_in_sync) for one in sums]
        return pack(value, sums)

    def all_gather(self, value: Any, axis: int, options: CommunicationOptions | None = None) -> Any:
        """Returns the replicas' values, concatenated along an axis, on every replica.

        All replicas must call this method, in the same order. The gradient of the result is summed
        over the replicas, and each replica gets the part of this sum that belongs to its own
        tensor.

        Args:
            value: A tensor of at least one dimension, or nested lists, tuples and dicts of such
                tensors. The shapes on the replicas may differ only along `axis`.
            axis: The axis; negative values count from the end.
            options: These options have no effect and cause a warning, because each backend chooses
                by the size of the tensors how to communicate.

        Returns:
            The same structure with gathered tensors.

        Raises:
            ScopeError: If this is not the context of the replica that runs the call.
            ValueError: If a tensor has no such axis.
            ReplicaError: If the replicas do not all make the same call.
        """
        self._require_in_force("all_gather")
        check_communication(communication_of(options), "all_gather", ())
        gather = self.collectives.all_gather
        return map_leaves(lambda leaf: gather(leaf, axis_of_rows(leaf, axis)), value)

    def __enter__(self) -> ReplicaContext:
        scope = replica_scope(self)
        scope.__enter__()
        self._entered.append(scope)
        return self

    def __exit__(self, *error: Any) -> None:
        self._entered.pop().__exit__(*error)

    def _require_in_force(self, call: str) -> None:
        if replica_context_in_force() is not self:
            raise ScopeError(
                f"Expected {call} on the context of the replica that runs this code. Received: a "
                f"call on the context of replica {self.replica_id_in_sync_group} of "
                f"{self.strategy}. Get the context in force with kerasdist.get_replica_context()."
            )


def global_batch(tensor: object) -> Any:
    """Gathers the rows of a tensor from all replicas, in the order of the global batch.

    Use this function in a model, a loss or a `train_step` that mixes examples, such as a
    contrastive loss over the batch, because on TensorFlow and PyTorch a replica holds only its own
    rows. Gradients flow through the call. On one device, on JAX (where `fit` is one global
    program), and outside of a replica, the function returns `tensor` itself. All replicas must call
    this function.

    Example::

        class Contrastive(keras.losses.Loss):
            def call(self, left, right):
                right = kd.global_batch(right)
                return -keras.ops.matmul(left, keras.ops.transpose(right))[:, 0]

    Args:
        tensor: A tensor of shape ``(n, ...)``, where n is the replica's own number of examples.

    Returns:
        A tensor of shape ``(N, ...)``, where N is the number of examples in the global batch.
    """
    replica = current.replica
    return tensor if replica is None else replica.collectives.all_gather(tensor)
