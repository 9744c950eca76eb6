"""The collectives of one replica's code on TensorFlow."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import keras
import tensorflow as tf

from kerasdist import keras_compat
from kerasdist.api.options import CommunicationOptions
from kerasdist.api.replica_context import LocalBatch
from kerasdist.backends.base.checks import differing_calls
from kerasdist.backends.base.collectives import DEFAULT_COMMUNICATION, Apply, Collectives, Variables
from kerasdist.backends.base.kept_state import KeptState
from kerasdist.backends.base.variable_rules import counts_all_replicas, is_on_read, is_sum_on_read
from kerasdist.backends.tensorflow.fit import gradients as gradient_sums
from kerasdist.backends.tensorflow.fit.batches import counted_rows
from kerasdist.backends.tensorflow.private.compiled import converted_as_here
from kerasdist.backends.tensorflow.private.lookups import Lookups, Terms
from kerasdist.backends.tensorflow.private.strategies import keeps_one_copy
from kerasdist.backends.tensorflow.replica.outside_replicas import apply_everywhere
from kerasdist.backends.tensorflow.replica.values import check_alike, regrouped, to_native
from kerasdist.backends.tensorflow.replica.variables import adopt_all, copies, is_foreign
from kerasdist.core.context import current, replaced, replica_scope
from kerasdist.core.structures import Arguments, map_leaves
from kerasdist.errors import UnsupportedError
from kerasdist.job.collectives import code_here
from kerasdist.training import numerics
from kerasdist.training.batch_norm import combined

if TYPE_CHECKING:
    from kerasdist.api.strategy import Strategy
    from kerasdist.backends.tensorflow.workers.group import Group


# The tensors of a call: for each tensor, its components on the replicas of this process.
Columns = list[tuple[Any, ...]]

# Keras's own assignment, which takes a variable and a value.
Write = Callable[[Any, Any], Any]

# The key of an optimizer's step in `TensorFlowCollectives._deferred`.
_UPDATE = "update"


@dataclass(frozen=True)
class Given:
    """A call of a collective by one replica, with the replica's tensors.

    Attributes:
        call: The name of the call.
        tensors: The replica's tensors.
    """

    call: str
    tensors: Sequence[Any]


def columns_of(everyone: Sequence[Given]) -> Columns:
    """Returns one column per tensor of a call, with the tensors of all replicas of this process.

    Raises an error unless these replicas have made the same call, with equally many tensors.
    """
    calls = [f"{one.call} of {len(one.tensors)}" for one in everyone]
    if len(set(calls)) > 1:
        raise differing_calls(f"calls={calls}, by replica")
    return list(zip(*(one.tensors for one in everyone), strict=True))


@dataclass(frozen=True)
class Deferred:
    """An optimizer's step or an assignment that waits until the replicas' tensors are summed.

    Attributes:
        call: The name of the call, for error messages.
        given: What this replica adds to the sums: gradients, or changes of a variable. If the sum
            is weighted by the replicas' fractions of the batch, they are already multiplied by this
            replica's fraction.
        finish: A function that gets the sums over all replicas, and does the deferred step or
            assignment.
    """

    call: str
    given: Sequence[Any]
    finish: Callable[[list[Any]], Any]


def moments(inputs: tf.Tensor, axes: Sequence[int]) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the mean and variance of each channel of a replica's rows; zeros if it has no rows.

    The operations are the same as in plain Keras. Their gradient takes one pass over the rows,
    because TensorFlow treats the mean inside of the variance as a constant. The gradient is still
    exact, because the variance's derivative with respect to the mean is zero.
    """
    mean, variance = (tf.reshape(one, [-1]) for one in tf.nn.moments(inputs, axes))
    if inputs.shape.num_elements():  # the static number of elements is known and not zero
        return mean, variance
    has_rows = tf.size(inputs) > 0
    return tf.where(has_rows, mean, 0), tf.where(has_rows, variance, 0)


@final
class TensorFlowCollectives(Collectives):
    """The collectives of one replica, in a graph or eagerly."""

    own_moments = staticmethod(moments)

    def __init__(
        self,
        group: Group,
        replica: int,
        local_batch: LocalBatch | None,
        lookups: Lookups | None = None,
        *,
        kept: KeptState | None,
        waits: bool = False,
    ) -> None:
        self._replica = replica
        # A weak reference, because TensorFlow keeps the functions of `tf.custom_gradient`, which
        # refer to this object, forever.
        self._kept = None if kept is None else weakref.ref(kept)
        self._local_batch = local_batch
        self._lookups = lookups
        self._differentiates = self._loss_is_weighted = False
        self._writes_equal = False
        self._group = group
        self._native_strategy = group.native_strategy
        self._waits = waits
        # The assignments and the optimizer's step whose tensors are not yet summed over the
        # replicas. The keys are the ids of the assigned variables, or `_UPDATE`.
        self._deferred: dict[int | str, Deferred] = {}

    def differentiated_loss(self, loss: Any, *, is_weighted: bool) -> Any:
        """Returns the loss. If `is_weighted`, its backward pass sets `_loss_is_weighted`."""
        if not is_weighted:
            return loss

        @tf.custom_gradient
        def marked(given: tf.Tensor) -> tuple[tf.Tensor, Callable[..., Any]]:
            def gradient(upstream: tf.Tensor) -> tf.Tensor:
                self._loss_is_weighted = True
                return upstream

            return tf.identity(given), gradient

        return marked(loss)

    def differentiate(self, gradient: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls a tape's ``gradient``, and records during the call whether the loss is weighted.

        Code that is recomputed in a backward pass may call this method again. Then only the loss of
        the outer backward pass counts.
        """
        if self._differentiates:
            return gradient(*args, **kwargs)
        self._loss_is_weighted = False
        with replaced(self, "_differentiates", True):
            return gradient(*args, **kwargs)

    def merge_call(self, strategy: Strategy, function: Callable[..., Any], given: Arguments) -> Any:
        """Calls the function once, in the thread in which tf.distribute runs cross-replica code."""
        native_strategy = self._native_strategy
        function = converted_as_here(function)

        def merged(parts: Columns) -> Any:
            [merging] = (regrouped(native_strategy, one) for one in parts)
            # TensorFlow chooses the device, as in other cross-replica code.
            with replica_scope(None), tf.device(None):
                return to_native(native_strategy, merging.call(function, strategy))

        return _own(self._combine("merge_call", [given], merged))

    def mean_of_sum(self, total: Any, replicas: int) -> Any:
        """Converts a value's sum over the replicas to the mean; a mean of integers is a float."""
        return gradient_sums.divide(total, replicas)

    def all_sum(
        self, tensors: Sequence[Any], options: CommunicationOptions = DEFAULT_COMMUNICATION
    ) -> list[Any]:
        """Returns each tensor summed over the replicas; the sums are differentiable.

        The sum of ``tf.IndexedSlices`` is their concatenation, which is not differentiable. In
        `fit` a replica without rows adds nothing.
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
        """Concatenates the replicas' tensors along an axis; the result is differentiable.

        In `fit` a replica without rows adds no rows along axis 0.
        """
        if self._local_batch is not None and axis == 0 and not isinstance(tensor, tf.IndexedSlices):
            tensor = counted_rows(tensor, self._local_batch.size)
        return self._gathered(tensor, axis)

    def all_stack(self, tensor: Any) -> Any:
        """Stacks the replicas' tensors; the result is differentiable.

        In `fit` the entry of a replica without rows is zeros.
        """
        return self._gathered(self._counted(tensor)[tf.newaxis], 0)

    def all_moments(self, inputs: tf.Tensor, axes: Sequence[int]) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns mean and variance of all replicas' rows.

        The gradient is written by hand. It has a third of the operations of the gradient that
        TensorFlow would derive.
        """
        shape = [1 if axis in axes else -1 for axis in range(inputs.shape.rank)]

        @tf.custom_gradient
        def of_all(rows: tf.Tensor) -> tuple[tuple[tf.Tensor, tf.Tensor], Callable[..., object]]:
            mean, variance = moments(rows, axes)
            number = tf.size(rows, tf.int64) // tf.size(mean, tf.int64)
            count = tf.fill(mean.shape, tf.cast(number, mean.dtype))
            every = self.all_stack(tf.stack([count, mean, variance]))
            counts, means, variances = tf.unstack(every, axis=1)
            mean, variance = combined(counts, means, counts * variances, added=0.0)
            count = tf.reduce_sum(counts, 0)

            def gradient(of_mean: tf.Tensor, of_variance: tf.Tensor) -> tf.Tensor:
                [total] = self._gradients_of_sums(tf.stack([of_mean, of_variance]))
                of_mean, of_variance, center = (
                    tf.reshape(one, shape) for one in (*tf.unstack(total / count), mean)
                )
                return of_mean + 2 * of_variance * (rows - center)

            return (mean, variance), gradient

        found: Any = of_all(inputs)
        return found

    def _gathered(self, tensor: Any, axis: int) -> Any:
        def together(parts: Columns) -> tuple[Any, list[Any]]:
            # In a graph of `fit` a static size does not depend on the batch, so the sizes of all
            # replicas' tensors are equal.
            known = self._local_batch is not None and not tf.executing_eagerly()
            equal_sizes = known and parts[0][0].shape[axis] is not None
            return self._group.concatenation(parts[0], axis, equal_sizes=equal_sizes)

        is_dense = not isinstance(tensor, tf.SparseTensor | tf.RaggedTensor)
        tensor = tf.convert_to_tensor(tensor) if is_dense else tensor
        if not (is_dense and tensor.dtype.is_floating):
            whole, _ = self._combine("all_gather", [tensor], together)
            return _own(whole)

        @tf.custom_gradient
        def gathered(given: tf.Tensor) -> tuple[tf.Tensor, Callable[..., Any]]:
            size = tf.shape(given)[axis]
            whole, sizes = self._combine("all_gather", [given], together)

            def gradient(upstream: tf.Tensor) -> tf.Tensor:
                begin = tf.add_n(sizes[: self._replica]) if self._replica else 0
                [total] = self._gradients_of_sums(upstream)
                own = total[(slice(None),) * axis + (slice(begin, begin + size),)]
                return tf.ensure_shape(own, given.shape)

            return whole, gradient

        return gathered(tensor)

    def apply_gradients(
        self, apply: Apply, optimizer: keras.Optimizer, gradients: list[Any], variables: Variables
    ) -> None:
        """Sums the gradients over the replicas, then updates every copy of the variables.

        In `fit` a replica's gradients are first multiplied by its fraction of the global batch.
        """
        known = keras_compat.optimized_variables(optimizer) if variables is None else variables
        replaced = self.replaced_by_gradients(gradients, known)
        weight = self._local_batch and numerics.weight_of_gradients(
            optimizer, self._local_batch.weight
        )
        added = [None if index in replaced else one for index, one in enumerate(gradients)]
        if weight is not None:
            added = [gradient_sums.weighted(gradient, weight) for gradient in added]
        terms = [
            Terms((one,)) if self._lookups is None else self._lookups.terms(one) for one in added
        ]

        def update(sums: list[Any]) -> None:
            parts = iter(sums)
            totals = [one.gradient([next(parts) for _ in one.added]) for one in terms]
            every = [replaced.get(index, total) for index, total in enumerate(totals)]
            apply_everywhere(self._native_strategy, optimizer, every, variables)

        if _UPDATE in self._deferred:
            raise UnsupportedError(
                "Expected one optimizer step in Keras's own train_step. Received: a second one, "
                f"of {optimizer!r:.200}. Write the steps in a train_step of your own."
            )
        tensors = [tensor for one in terms for tensor in one.added]
        self._sum_then(_UPDATE, Deferred("apply", tensors, update))

    def end_step(self, variables: Sequence[keras.Variable]) -> list[tf.Tensor]:
        """Finishes deferred updates and assignments, and reads the given variables.

        All sums that this takes are made together. All replicas must call this method. Returns the
        values of `variables`, aggregated over all replicas, for the step's logs.
        """
        waiting, self._deferred = list(self._deferred.values()), {}
        if not waiting and not variables:
            return []
        return self._finish("a metric's result or the end of the step", waiting, variables)

    def _finish(
        self, call: str, waiting: Sequence[Deferred], variables: Sequence[keras.Variable] = ()
    ) -> list[tf.Tensor]:
        own = [tf.convert_to_tensor(variable.value) for variable in variables]

        def update(parts: Columns) -> list[tf.Tensor]:
            sums = iter(self._group.sums(parts, here=False))
            for one in waiting:
                one.finish(list(itertools.islice(sums, len(one.given))))
            return self._group.aggregate(variables, list(sums))

        given = [tensor for one in waiting for tensor in one.given]
        return self._combine(call, [*given, *own], update)

    def summed(self, variables: Sequence[keras.Variable]) -> list[tf.Tensor]:
        """Returns each variable's sum over the replicas; its ``aggregation`` must be "sum"."""
        if keeps_one_copy(self._native_strategy):
            return [tf.convert_to_tensor(variable.value) for variable in variables]
        return self.end_step(variables)

    def before_read(self, variable: keras.Variable) -> None:
        """Finishes a deferred assignment to the variable, so that the new value is read.

        In a custom loop, a variable made outside of the scope gets a copy on every device before it
        is first read.
        """
        waiting = self._deferred.pop(id(variable), None)
        if waiting is not None:
            self._finish(waiting.call, [waiting])
        elif self._local_batch is None and is_foreign(variable, self._native_strategy):

            def mirrored(parts: Columns) -> None:
                with tf.init_scope():
                    adopt_all(parts[0], self._native_strategy)

            self._combine("the first use of a variable from outside", [variable], mirrored)

    def assign(self, variable: keras.Variable, value: Any, write: Write) -> Any:
        """Assigns to a variable; in `fit`, as one device would for the global batch.

        In `fit` the replicas' changes are combined, that is, the differences between the assigned
        values and the old value. ``tf.distribute`` combines the assigned values instead. In `fit`
        their sum would count the old value once per replica, and their mean would ignore how many
        rows each replica has. Users expect the behaviour of ``tf.distribute`` in custom loops, so
        custom loops have it, with one exception. With central storage, a variable that is summed on
        read, such as a metric's variable, has only one copy. Each replica then adds its change to
        that copy.
        """
        is_combined = counts_all_replicas(variable)
        if keeps_one_copy(self._native_strategy):
            changes = is_combined and not self._writes_equal
            return (self._assign_changes if changes else self._assign_once)(variable, value, write)
        if self._local_batch is None:
            self.before_read(variable)
            return write(variable, value)
        if is_sum_on_read(variable):
            return write(variable, self._own_part(variable, value))
        if is_on_read(variable) or not is_combined:
            return write(variable, value)
        return self._assign_changes(variable, value, write)

    def _own_part(self, variable: keras.Variable, value: Any) -> Any:
        """Returns what this replica stores as its component of a variable that is read as a sum.

        A replica without rows keeps its old component, except inside of `equal_writes`.
        """
        weight = self._local_batch.weight  # type: ignore[union-attr]
        if isinstance(weight, float) or self._writes_equal:
            return value
        before = tf.convert_to_tensor(variable.value)
        return tf.where(weight > 0, tf.cast(value, before.dtype), before)

    def equal_writes(self) -> AbstractContextManager[None]:
        """Returns a context for assignments of values that are equal on all replicas.

        Inside of the context a replica without rows makes its assignments as well.
        """
        return replaced(self, "_writes_equal", True)

    def _assign_once(self, variable: keras.Variable, value: Any, write: Write) -> None:
        """Assigns to a variable that has a single copy. The replicas' values must be equal."""

        def update(parts: Columns) -> None:
            write(variable, parts[0][0])

        self._combine("assign", [tf.convert_to_tensor(value)], update)

    def _assign_changes(self, variable: keras.Variable, value: Any, write: Write) -> None:
        before = tf.convert_to_tensor(variable.value)
        if self._local_batch is None and not is_on_read(variable):
            before = tf.zeros_like(before)
        change = tf.cast(value, before.dtype) - before
        if variable.aggregation == "mean":
            replicas = self._native_strategy.num_replicas_in_sync
            change = (
                change / replicas
                if self._local_batch is None
                else gradient_sums.weighted(change, self._local_batch.weight)
            )
        else:
            change = self._counted(change)

        def finish(sums: list[Any]) -> None:
            write(variable, before + copies(sums[0])[0])

        self._sum_then(id(variable), Deferred("assign", [change], finish))

    def _sum_then(self, key: int | str, what: Deferred) -> None:
        if self._waits:
            self._deferred[key] = what
        else:
            self._finish(what.call, [what])

    def _combine(self, call: str, given: Sequence[Any], function: Callable[[Columns], Any]) -> Any:
        """Calls a function once with all replicas' tensors; all replicas must call this method.

        Returns the function's result; a distributed value is replaced by the replica's component.
        """
        # The record of the collective names the line of user code that has called it. Another
        # thread issues the collective, so the line is looked up here, in the replica's thread.
        code = code_here() if self._group.is_recorded else ""

        def merged(native_strategy: tf.distribute.Strategy, everyone: object) -> Any:
            # Without a device, operations would run on the first GPU of the machine.
            device = tf.device(native_strategy.extended.worker_devices[0])
            with replaced(current, "issued_for", code), device:
                return function(columns_of(copies(everyone)))

        replica_context = tf.distribute.get_replica_context()
        kept = self._kept and self._kept()
        taken = kept.take() if kept else {}
        # All tensors are passed inside of one `Given`, because merge_call would not make a
        # distributed value of a tensor that is the same object in all replicas.
        result = replica_context.merge_call(
            tf.autograph.experimental.do_not_convert(merged), args=(Given(call, given),)
        )
        if kept:
            kept.put_back(taken)
        return result

    def _sums(
        self, given: Sequence[tf.Tensor], options: CommunicationOptions = DEFAULT_COMMUNICATION
    ) -> list[tf.Tensor]:
        def sums(parts: Columns) -> list[Any]:
            for part in parts:
                check_alike(part)
            return self._group.sums(parts, options, here=False)

        return self._combine("all_reduce", given, sums)

    def _gradients_of_sums(self, *upstream: tf.Tensor) -> list[tf.Tensor]:
        """Returns the gradients of sums over the replicas with respect to this replica's terms.

        In a custom loop the global loss is the sum of the replicas' losses. In `fit` it is a
        weighted mean of these losses: a replica's weight is its fraction of the global batch's
        rows. So the gradient with respect to a sum is the sum of the replicas' gradients, each
        multiplied by its replica's weight. `apply_gradients` later multiplies this replica's
        gradients by the replica's weight, so here the sum is divided by that weight. If a loss was
        multiplied by the weight before it was differentiated, `upstream` already contains the
        weight.
        """
        if self._local_batch is None:
            return self.all_sum(upstream)
        weight = self._local_batch.weight
        if self._loss_is_weighted:
            weight = numerics.presence(weight)
        sums = self._sums([gradient_sums.weighted(gradient, weight) for gradient in upstream])
        return [numerics.per_weight(total, weight) for total in sums]

    def _counted(self, value: Any) -> Any:
        """Returns the value, or zeros on a replica without rows in `fit`."""
        return (
            value
            if self._local_batch is None
            else gradient_sums.counted(value, self._local_batch.weight)
        )


def collectives_here() -> TensorFlowCollectives:
    """Returns the collectives of the replica whose code the calling thread runs."""
    replica = current.replica
    assert replica is not None
    assert isinstance(replica.collectives, TensorFlowCollectives)
    return replica.collectives


def _own(structure: object) -> Any:
    """Returns a structure with a copy of each tensor, which only this replica has.

    If all replicas returned the same tensor object, `regrouped` would not make a distributed value.
    """

    def own(leaf: object) -> Any:
        if not tf.is_tensor(leaf) or isinstance(leaf, tf.Variable):
            return leaf
        return tf.nest.map_structure(tf.identity, leaf, expand_composites=True)

    return map_leaves(own, structure)
