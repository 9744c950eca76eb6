"""One replica's side of the exchange with the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

import tensorflow as tf

from kerasdist import context, keras_seam
from kerasdist.backends.collectives import DEFAULT_COMMUNICATION, Apply, Collectives
from kerasdist.backends.tensorflow import gradients as gradient_sums
from kerasdist.backends.tensorflow.adoption import adopt_all, is_foreign
from kerasdist.backends.tensorflow.batches import counted_rows
from kerasdist.backends.tensorflow.components import check_alike
from kerasdist.backends.tensorflow.engine_seam import converted_as_here, keeps_one_copy
from kerasdist.backends.tensorflow.exchange import Exchange
from kerasdist.backends.tensorflow.summed_steps import Update, Write
from kerasdist.backends.tensorflow.values import regrouped, to_native
from kerasdist.backends.tensorflow.variables import gradient_replaces
from kerasdist.collectives import CommunicationOptions
from kerasdist.errors import UnsupportedError
from kerasdist.replica_context import BatchShare
from kerasdist.structures import map_leaves
from kerasdist.training import numerics

if TYPE_CHECKING:
    from kerasdist.strategy import Strategy


@final
class TensorFlowCollectives(Collectives):
    """What the code of one replica can ask of the others, in a graph or eagerly."""

    weighs_scaled_losses = True

    def __init__(
        self, exchange: Exchange, replica: int, share: BatchShare | None, *, waits: bool = False
    ) -> None:
        """Makes one replica's side.

        Args:
            exchange: Where the replicas meet.
            replica: This replica's number.
            share: Its part of the batch; None where gradients are summed as they are.
            waits: Whether the optimizer, and assignments to what is not read before, wait for
                `end_step`, which must then be called.
        """
        self._exchange = exchange
        self._replica = replica
        self._share = share
        self._loss_is_weighed = False
        self._group = exchange.group
        self._engine = exchange.group.engine
        self._waits = waits
        self._waiting: Update | None = None
        self._writes: dict[int, Write] = {}

    def differentiated_loss(self, optimizer: Any, loss: Any, *, is_weighed: bool) -> Any:
        """Returns a loss that says, when it is differentiated, whether it has been weighed."""
        del optimizer

        @tf.custom_gradient
        def marked(given: tf.Tensor) -> tuple[tf.Tensor, Callable[..., Any]]:
            def gradient(upstream: tf.Tensor) -> tf.Tensor:
                self._loss_is_weighed = is_weighed
                return upstream

            return tf.identity(given), gradient

        return marked(loss)

    def merge_call(
        self,
        strategy: Strategy,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Calls the function once, in the thread that the engine runs cross-replica code in."""
        engine = self._engine
        function = converted_as_here(function)

        def merged(parts: list[tuple[Any, ...]]) -> Any:
            all_args, all_kwargs = (regrouped(engine, part) for part in parts)
            # As in cross-replica code elsewhere, TensorFlow chooses the device.
            with context.replica_scope(None), tf.device(None):
                return to_native(engine, function(strategy, *all_args, **all_kwargs))

        return _own(self._combine("merge_call", [tuple(args), dict(kwargs)], merged))

    def mean_of_sum(self, total: Any, replicas: int) -> Any:
        """Returns a sum divided by the number of replicas, in its type."""
        if isinstance(total, tf.IndexedSlices):
            values = self.mean_of_sum(total.values, replicas)
            return tf.IndexedSlices(values, total.indices, total.dense_shape)
        return tf.cast(total / tf.cast(replicas, total.dtype), total.dtype)

    def all_sum(
        self, tensors: Sequence[Any], options: CommunicationOptions = DEFAULT_COMMUNICATION
    ) -> list[Any]:
        """Returns each tensor summed over the replicas, with its gradient.

        ``tf.IndexedSlices`` come back as the slices of all replicas, without a gradient. In `fit` a
        replica without example adds nothing.
        """
        tensors = [self._counted(tensor) for tensor in tensors]
        sparse = [isinstance(tensor, tf.IndexedSlices) for tensor in tensors]
        if any(sparse):
            slices = [one for one, is_sparse in zip(tensors, sparse, strict=True) if is_sparse]
            all_slices = iter(self._combine("all_reduce of slices", slices, self._group.sums))
            dense = [one for one, is_sparse in zip(tensors, sparse, strict=True) if not is_sparse]
            sums = iter(self.all_sum(dense, options) if dense else [])
            return [next(all_slices if is_sparse else sums) for is_sparse in sparse]

        @tf.custom_gradient
        def with_gradient(*given: tf.Tensor) -> tuple[list[tf.Tensor], Callable[..., Any]]:
            return self._sums(given, options), self._gradients_of_sums

        return list(with_gradient(*[tf.convert_to_tensor(tensor) for tensor in tensors]))

    def all_gather(self, tensor: Any, axis: int = 0) -> Any:
        """Returns the replicas' tensors along an axis, with their gradient.

        In `fit`, along the rows, a replica without example has none.
        """
        if self._share is not None and axis == 0 and not isinstance(tensor, tf.IndexedSlices):
            tensor = counted_rows(tensor, self._share)
        return self._gathered(tensor, axis)

    def all_stack(self, tensor: Any) -> Any:
        """Returns the replicas' tensors stacked, with their gradient; see `Collectives`.

        In `fit` a replica without example gives zeros.
        """
        return self._gathered(self._counted(tensor)[tf.newaxis], 0)

    def _gathered(self, tensor: Any, axis: int) -> Any:
        if isinstance(tensor, tf.IndexedSlices):
            raise UnsupportedError(
                "Expected a dense tensor. Received: value of type tf.IndexedSlices. Convert it "
                "with tf.convert_to_tensor, or gather its values and its indices."
            )

        def together(parts: list[tuple[Any, ...]]) -> Any:
            return self._concatenation(parts, axis)[0]

        if isinstance(tensor, tf.SparseTensor | tf.RaggedTensor):
            return _own(self._combine("all_gather", [tensor], together))
        tensor = tf.convert_to_tensor(tensor)
        if not tensor.dtype.is_floating:
            return _own(self._combine("all_gather", [tensor], together))

        @tf.custom_gradient
        def gathered(given: tf.Tensor) -> tuple[tf.Tensor, Callable[..., Any]]:
            size = tf.shape(given)[axis]
            whole, sizes = self._combine(
                "all_gather", [given], lambda parts: self._concatenation(parts, axis)
            )

            def gradient(upstream: tf.Tensor) -> tf.Tensor:
                begin = tf.add_n(sizes[: self._replica]) if self._replica else 0
                [total] = self._gradients_of_sums(upstream)
                own = total[(slice(None),) * axis + (slice(begin, begin + size),)]
                return tf.ensure_shape(own, given.shape)

            return whole, gradient

        return gathered(tensor)

    def apply_gradients(
        self, apply: Apply, optimizer: Any, gradients: list[Any], variables: list[Any] | None
    ) -> None:
        """Weighs the gradients, sums them, and updates every copy of the variables, in one go."""
        known = keras_seam.optimized_variables(optimizer) if variables is None else variables
        replaces = [gradient_replaces(variable) for variable in known]
        weight = self._share and numerics.weight_of_gradients(optimizer, self._share.weight)
        self._loss_is_weighed = False  # as is one that `scale_loss` does not see

        def own_part(gradient: Any, replaced: bool) -> Any:
            if gradient is None or weight is None:
                return gradient
            if replaced:
                return self._counted(gradient)
            return gradient_sums.weighted(gradient, weight)

        given = [own_part(*pair) for pair in zip(gradients, replaces, strict=True)]

        step = Update(optimizer, known, variables, given)
        if self._waits and not any(replaces):
            if self._waiting is not None:
                raise UnsupportedError(
                    "Expected one optimizer step in a training step of Keras's own. Received: a "
                    f"second one, of {optimizer!r:.200}. Write the steps in a train_step."
                )
            self._waiting = step
            return

        def update(parts: list[tuple[Any, ...]]) -> None:
            step.apply(self._engine, self._reduced(optimizer, parts, known, replaces))

        self._combine("apply", given, update)

    def end_step(self, variables: Sequence[Any]) -> list[tf.Tensor]:
        """Does what waits for the end of the step, and reads variables; all replicas must call it.

        One collective serves both, so that what is said about a step costs no second one.

        Args:
            variables: Keras variables that each replica writes for itself.

        Returns:
            What all replicas hold of each.
        """
        step, self._waiting = self._waiting, None
        writes, self._writes = list(self._writes.values()), {}
        if step is None and not writes and not variables:
            return []
        gradients = [] if step is None else step.gradients
        here = step is None or keras_seam.computes_on_gradients(step.optimizer)
        own = [tf.convert_to_tensor(variable.value) for variable in variables]

        def update(parts: list[tuple[Any, ...]]) -> list[tf.Tensor]:
            sums = iter(self._group.sums(parts, here=here))
            ours = [next(sums) for _ in gradients]
            if step is not None:
                step.apply(self._engine, ours)
            for one in writes:
                one.finish(next(sums))
            return self._group.wholes(variables, list(sums))

        changes = [one.change for one in writes]
        return self._combine("end of the step", [*gradients, *changes, *own], update)

    def mirror_before_read(self, variable: Any) -> None:
        """Gives a variable that was made outside of the scope copies, before it is first read.

        A function that is being compiled then holds the copies, not the variable from outside.

        Args:
            variable: A Keras variable.
        """
        if not is_foreign(variable, self._engine):
            return

        def mirrored(parts: list[tuple[Any, ...]]) -> None:
            with tf.init_scope():
                adopt_all(parts[0], self._engine)

        self._combine("the first use of a variable from outside", [variable], mirrored)

    def before_read(self, variable: Any) -> None:
        """Finishes an assignment to the variable that waits, so that what is read is new.

        Args:
            variable: A Keras variable.
        """
        waiting = self._writes.pop(id(variable), None)
        if waiting is not None:
            self._finish(waiting)

    def assign(self, variable: Any, value: Any, write: Callable[[Any, Any], Any]) -> Any:
        """Combines what the replicas assign, as if one device had assigned for the whole batch.

        ``tf.distribute`` sums or averages the values themselves: a count of examples would also
        sum up what it was before, and a mean would forget who has how many examples. Where no
        share of the batch is known, that is what users of ``tf.distribute`` expect.
        """
        if keeps_one_copy(self._engine):
            return self._assign_to_the_copy(variable, value, write)
        if self._share is None:
            self.mirror_before_read(variable)
            return write(variable, value)
        if variable.synchronization == "on_read" and variable.aggregation == "sum":
            return write(variable, self._own_part(variable, value))
        if variable.synchronization == "on_read" or variable.aggregation not in ("sum", "mean"):
            return write(variable, value)
        return self._assign_changes(variable, value, write)

    def _own_part(self, variable: Any, value: Any) -> Any:
        """What a replica's part of a sum becomes, such as a metric's: as it was, without example.

        Args:
            variable: The Keras variable.
            value: What the replica would write.
        """
        weight = self._share.weight  # type: ignore[union-attr]
        if isinstance(weight, float):
            return value
        before = tf.convert_to_tensor(variable.value)
        return tf.where(weight > 0, tf.cast(value, before.dtype), before)

    def _assign_to_the_copy(
        self, variable: Any, value: Any, write: Callable[[Any, Any], Any]
    ) -> Any:
        """Assigns to a variable of which there is one, that of a metric included."""
        if variable.aggregation in ("sum", "mean"):
            return self._assign_changes(variable, value, write)

        def update(parts: list[tuple[Any, ...]]) -> None:
            write(variable, parts[0][0])  # equal in all replicas

        return self._combine("assign", [tf.convert_to_tensor(value)], update)

    def _assign_changes(self, variable: Any, value: Any, write: Callable[[Any, Any], Any]) -> None:
        before = tf.convert_to_tensor(variable.value)
        change = tf.cast(value, before.dtype) - before
        if variable.aggregation == "mean":
            replicas = self._engine.num_replicas_in_sync
            change = change / replicas if self._share is None else self._weighted(change)
        else:
            change = self._counted(change)

        step = Write(variable, before, change, write)
        if self._waits:
            self._writes[id(variable)] = step
        else:
            self._finish(step)

    def _finish(self, step: Write) -> None:
        def update(parts: list[tuple[Any, ...]]) -> None:
            [total] = self._group.sums(parts)
            step.finish(total)

        self._combine("assign", [step.change], update)

    def _reduced(
        self,
        optimizer: Any,
        parts: list[tuple[Any, ...]],
        variables: list[Any],
        replaces: list[bool],
    ) -> list[Any]:
        # The optimizer then computes on the first device; what it computed goes to the others.
        here = any(replaces) or keras_seam.computes_on_gradients(optimizer)
        largest = [
            self._group.largest(part) if replaced else None
            for part, replaced in zip(parts, replaces, strict=True)
        ]
        added = [
            (None,) * len(part) if replaced else part
            for part, replaced in zip(parts, replaces, strict=True)
        ]
        sums = self._group.sums_of_gradients(added, variables, here=here)
        return [
            one if replaced else total
            for one, total, replaced in zip(largest, sums, replaces, strict=True)
        ]

    def _concatenation(self, parts: list[tuple[Any, ...]], axis: int) -> tuple[Any, list[Any]]:
        # In a graph of `fit` a size that is known does not depend on the batch.
        known = self._share is not None and not tf.executing_eagerly()
        equal_sizes = known and parts[0][0].shape[axis] is not None
        return self._group.concatenation(parts[0], axis, equal_sizes=equal_sizes)

    def _combine(
        self, call: str, given: Sequence[Any], function: Callable[[list[tuple[Any, ...]]], Any]
    ) -> Any:
        return self._exchange.combine(self._replica, call, given, function)

    def _sums(
        self, given: Sequence[tf.Tensor], options: CommunicationOptions = DEFAULT_COMMUNICATION
    ) -> list[tf.Tensor]:
        def sums(parts: list[tuple[Any, ...]]) -> list[Any]:
            for part in parts:
                check_alike(part)
            # Where a share is known they are few and small.
            return self._group.sums(parts, options, here=self._share is not None)

        return self._combine("all_reduce", given, sums)

    def _gradients_of_sums(self, *upstream: tf.Tensor) -> list[tf.Tensor]:
        """The derivative of the global loss by what this replica gave, as its own loss sees it.

        Without a share of the batch the global loss is the sum of the replicas' losses. With one it
        is their mean with the replicas' weights, and so is its derivative by a sum. This replica's
        gradients are weighed once more when they are applied, so its own weight is taken out here.
        A loss that was weighed before it was differentiated has brought the weight along.
        """
        if self._share is None:
            return self.all_sum(upstream)
        weight = self._share.weight
        if self._loss_is_weighed:
            weight = numerics.presence(weight)
        sums = self._sums([gradient_sums.weighted(gradient, weight) for gradient in upstream])
        return [numerics.per_weight(total, weight) for total in sums]

    def _counted(self, value: Any) -> Any:
        """What counts of a value in `fit`: zeros, from a replica without example."""
        return value if self._share is None else gradient_sums.counted(value, self._share.weight)

    def _weighted(self, gradient: Any) -> Any:
        return gradient_sums.weighted(gradient, self._share.weight)  # type: ignore[union-attr]


def collectives_here() -> TensorFlowCollectives:
    """Returns those of the replica whose code this is."""
    replica = context.replica()
    assert replica is not None
    assert isinstance(replica.collectives, TensorFlowCollectives)
    return replica.collectives


def _own(structure: Any) -> Any:
    """A copy of shared tensors: `Strategy.run` takes what is one object in all for no component."""

    def own(leaf: Any) -> Any:
        if not tf.is_tensor(leaf) or isinstance(leaf, tf.Variable):
            return leaf
        return tf.nest.map_structure(tf.identity, leaf, expand_composites=True)

    return map_leaves(own, structure)
