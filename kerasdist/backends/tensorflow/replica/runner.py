"""Runs user functions on the replicas; distributes their arguments and combines their results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from contextvars import copy_context
from typing import TYPE_CHECKING, Any, final
from weakref import WeakKeyDictionary

import tensorflow as tf

from kerasdist import keras_compat
from kerasdist.api.options import CommunicationOptions, ReduceOp
from kerasdist.api.replica_context import ReplicaContext
from kerasdist.backends.base.checks import axis_of_rows, check_shapes, checked_axes, differing_calls
from kerasdist.backends.base.interface import ReplicaSet
from kerasdist.backends.base.kept_state import KeptState
from kerasdist.backends.base.runner import Runner
from kerasdist.backends.tensorflow.fit import gradients as gradient_sums
from kerasdist.backends.tensorflow.fit.batches import HOST, OwnRows
from kerasdist.backends.tensorflow.private.compiled import (
    compiled_likewise,
    compiles_with_xla,
    converted_as_here,
    error_with_own_type,
)
from kerasdist.backends.tensorflow.private.lookups import Lookups
from kerasdist.backends.tensorflow.replica.collectives import TensorFlowCollectives
from kerasdist.backends.tensorflow.replica.values import (
    mirrored_on,
    per_replica,
    regrouped,
    shape_of,
    tensor_of_array,
    to_native,
)
from kerasdist.backends.tensorflow.replica.variables import copies, native, reads_preceded
from kerasdist.backends.tensorflow.workers.datasets import native_dataset
from kerasdist.backends.tensorflow.workers.group import Group
from kerasdist.core.context import current, replica_scope
from kerasdist.core.structures import Arguments, map_leaves, transpose
from kerasdist.errors import ReplicaError, UnsupportedError

if TYPE_CHECKING:
    from kerasdist.api.strategy import Strategy
    from kerasdist.core.context import StrategyLike
    from kerasdist.input.distributed import DistributedDataset

# Parts of TensorFlow's error messages.
_UNEQUAL = "made a different number of replica_context().merge_call() calls"
_IN_GRAPH = "`merge_call` called while defining a new graph"

_NOT_DIRECTLY = (
    "Expected collectives, optimizer.apply, assignments that are combined, and in fit a metric's "
    "result to be called directly in the step, or in the function that strategy.run runs. "
    "Received: such a call in a compiled function, a loop or a branch inside of the step, where "
    "replicas cannot wait for each other. Take tf.function off functions that a step calls: fit "
    "compiles the whole step. In a custom loop compile the function itself, or the function around "
    "strategy.run. Move the call out of loops and branches on tensors."
)


def in_replicas(
    strategy: StrategyLike,
    group: Group,
    code: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    local_rows: Sequence[OwnRows] | None = None,
    kept: KeptState | None = None,
    waits: bool = False,
) -> list[Any]:
    """Calls ``code(index, *args, **kwargs)`` once per replica of this process, from index 0.

    Each call runs in its replica's context, in a graph or eagerly. In `fit` each replica has its
    own local batch, and its own copy of the state that the code keeps in Python objects. With
    `waits`, the optimizer's update and assignments wait until the code calls `end_step`, or until
    their results are read. Returns one result per replica.
    """
    native_strategy, first = group.native_strategy, group.local.start
    results: list[Any] = [None] * len(group.local)
    thread_state, trial = keras_compat.copy_thread_state(), current.trial
    if kept:
        kept.begin(len(results))
    contexts = [copy_context() for _ in results]

    def replica_code(replica: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        contexts[replica - first].run(in_context, replica, args, kwargs)

    def in_context(replica: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        # tf.distribute starts a thread per replica. Keras's thread-local state is empty in a new
        # thread, so the state of the calling thread is copied.
        keras_compat.paste_thread_state(thread_state)
        index = replica - first
        local = None if local_rows is None else local_rows[index]
        local_batch, replicas = local and local.local_batch(), native_strategy.num_replicas_in_sync
        lookups = local and Lookups(local.rows, local.total, replicas)
        collectives = TensorFlowCollectives(
            group, replica, local_batch, lookups, kept=kept, waits=waits
        )
        here = ReplicaContext(
            strategy=strategy,
            replica_id_in_sync_group=replica,
            num_replicas_in_sync=replicas,
            collectives=collectives,
            local_batch=local_batch,
        )
        recorded = lookups.recorded() if lookups else nullcontext()
        with (
            keras_compat.in_trial(trial),
            replica_scope(here),
            reads_preceded(collectives.before_read),
            recorded,
        ):
            if kept:
                kept.start(index)
            results[index] = code(index, *args, **kwargs)
            if kept:
                kept.finish(index)

    try:
        native_strategy.run(
            tf.autograph.experimental.do_not_convert(replica_code),
            args=(per_replica(native_strategy, group.local), tuple(args), dict(kwargs or {})),
        )
    except RuntimeError as error:
        if _UNEQUAL in str(error):
            raise differing_calls("some replicas ended while others waited in a call") from error
        if _IN_GRAPH in str(error):
            raise ReplicaError(_NOT_DIRECTLY) from error
        raise
    except Exception as error:
        own = error_with_own_type(error)
        if own is error:
            raise
        raise own from own.__cause__
    finally:
        if kept:
            kept.end(is_last=not tf.executing_eagerly())
        # The calling thread gets the values that the first replica has set in context variables.
        for variable, value in contexts[0].items():
            if variable.get(None) is not value:
                variable.set(value)
    return results


@final
class TensorFlowRunner(Runner):
    """Runs functions on ``tf.distribute``'s distributed values, in a graph or eagerly."""

    def __init__(self, replica_set: ReplicaSet, group: Group) -> None:
        self._replica_set = replica_set
        self._group = group
        self._native_strategy = group.native_strategy
        self._shares_memory = group.shares_memory
        self.places_ahead = not self._shares_memory
        # For each `tf.function` of a user: a function that runs the user's code on all replicas, in
        # one graph.
        self._around: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()

    def run(self, strategy: Strategy, function: Callable[..., Any], given: Arguments) -> Any:
        """Calls a function once per replica, each time in a thread of ``tf.distribute``."""
        self._group.runs_loops = self._replica_set.reads_need_all_workers = True
        given = to_native(self._native_strategy, given)
        if isinstance(function, tf.types.experimental.PolymorphicFunction):
            # All replicas run in one graph, because separate graphs could not call collectives.
            return given.call(self._compiled_around(strategy, function))
        _refuse_xla()
        if tf.executing_eagerly():
            self._replica_set.begin_step()
        elif self._replica_set.job is not None:
            # A trace does not count as a step, because some workers may trace more often than
            # others. But it gives new variables the chief's values.
            self._replica_set.initial_broadcast.ensure()
        converted = converted_as_here(function)

        def code(_: int, /, *args: object, **kwargs: object) -> Any:
            return converted(*args, **kwargs)

        results = in_replicas(strategy, self._group, code, *given)
        return regrouped(self._native_strategy, results)

    def reduce(self, op: ReduceOp, value: Any, axis: int | Sequence[int] | None) -> Any:
        """Returns the sum or mean, on the host; the mean of integers is a float64."""
        parts = self._tensors(value)
        if axis is None:
            # Sparse gradients are concatenated, so their sizes may differ.
            dense = not any(isinstance(part, tf.IndexedSlices) for part in parts)
            columns = [self._fitting(parts) if dense else parts]
        else:
            axes = checked_axes(parts[0], axis)
            reduced = [self._at_home(tf.reduce_sum, i, p, axes) for i, p in enumerate(parts)]
            with tf.device(HOST):
                columns = [self._fitting(reduced), [_elements(part, axes) for part in parts]]
        with tf.device(HOST):
            total, *counted = self._group.sums(columns)
            count = counted[0] if counted else self._native_strategy.num_replicas_in_sync
            return total if op is ReduceOp.SUM else gradient_sums.divide(total, count)

    def gather(self, value: Any, axis: int) -> Any:
        """Returns the components, concatenated on the host."""
        parts = self._tensors(value)
        axis = axis_of_rows(parts[0], axis)
        with tf.device(HOST):
            return self._group.concatenation(self._fitting(parts, axis), axis)[0]

    def reduce_to(
        self, op: ReduceOp, values: Sequence[Any], options: CommunicationOptions
    ) -> list[Any]:
        """Returns the sum or mean of each value, with a copy on every device."""
        parts = [self._fitting(self._tensors(value)) for value in values]
        sums = self._group.sums(parts, options, here=False)
        if op is ReduceOp.MEAN:
            count = self._native_strategy.num_replicas_in_sync
            sums = [gradient_sums.divide(one, count) for one in sums]
        return [self.broadcast(one) for one in sums]

    def _fitting(self, parts: Sequence[Any], axis: int | None = None) -> Sequence[Any]:
        """Returns the components; in eager code, first checks that their shapes can be combined.

        If workers called a collective with different sizes, they would wait forever. Scalars are
        not compared between workers, because a comparison takes 0.2 ms, and a custom loop usually
        reduces a scalar in each step.
        """
        here = [shape_of(part) for part in parts]
        check_shapes(here, axis)
        job = self._replica_set.job
        if job is not None and tf.executing_eagerly() and parts[0].shape.rank != 0:
            everyone = job.all_gather_object("shapes of components", here)
            check_shapes([shape for theirs in everyone for shape in theirs], axis)
        return parts

    def broadcast(self, tensor: Any) -> Any:
        """Returns a value that has an equal component on every device."""
        if isinstance(tensor, tf.distribute.DistributedValues):
            return tensor
        return mirrored_on(self._native_strategy, tensor)

    def update(
        self, variable: Any, function: Callable[..., Any], given: Arguments
    ) -> Sequence[Any]:
        """Calls the function once per copy of a variable; each call sees only that copy.

        For a ``tf.Variable`` the function gets the copy. For a Keras variable the function gets the
        variable itself, which stands for the copy during the call.
        """
        converted = converted_as_here(function)
        is_native = native(variable) is variable
        results = []

        def update(copy: object, *args: object, **kwargs: object) -> None:
            results.append(converted(copy if is_native else variable, *args, **kwargs))

        update = tf.autograph.experimental.do_not_convert(update)
        given = to_native(self._native_strategy, given)
        self._native_strategy.extended.update(native(variable), update, *given)
        return results

    def per_replica(self, values: Sequence[Any]) -> Any:
        """Returns a distributed value of the given components.

        Arrays become tensors on the replicas' devices.
        """

        def placed(index: int, structure: object) -> Any:
            return map_leaves(lambda leaf: self._at_home(self._tensor_here, index, leaf), structure)

        def merged(parts: Sequence[Any]) -> Any:
            is_none = parts[0] is None
            return None if is_none else per_replica(self._native_strategy, parts)

        return transpose([placed(index, one) for index, one in enumerate(values)], merged)

    def native_dataset(self, dataset: DistributedDataset) -> Any | None:
        """Returns the equivalent ``tf.distribute`` dataset; None if there is no such dataset."""
        return native_dataset(self._group, dataset)

    def local_results(self, value: Any) -> tuple[Any, ...]:
        """Returns the components of a value in this process."""
        value = to_native(self._native_strategy, native(value))
        return tuple(self._native_strategy.experimental_local_results(value))

    def read(self, variable: Any) -> Any:
        """Returns a variable's value; for a sync-on-read variable, the aggregated value."""
        variable = native(variable)
        if isinstance(variable, tf.distribute.DistributedValues):
            variable = self._native_strategy.extended.read_var(variable)
        return tf.convert_to_tensor(variable)

    def created(self, variable: Any) -> bool:
        """Returns whether the variable was made in the native strategy's scope."""
        variable = native(variable)
        return isinstance(variable, tf.Variable) and (
            self._native_strategy.extended.variable_created_in_scope(variable)
        )

    def _compiled_around(self, strategy: Strategy, function: Any) -> Any:
        if function not in self._around:
            inner = function.python_function

            def around(*args: object, **kwargs: object) -> Any:
                return self.run(strategy, inner, Arguments(args, kwargs))

            self._around[function] = compiled_likewise(function, around)
        return self._around[function]

    def _tensors(self, value: Any) -> list[Any]:
        parts = copies(to_native(self._native_strategy, native(value)))
        if len(parts) == 1:  # a value that is the same on all replicas
            parts = [parts[0]] * len(self._group.local)
        return [
            part if isinstance(part, _COMPOSITE) else tf.convert_to_tensor(part) for part in parts
        ]

    def _tensor_here(self, leaf: Any) -> Any:
        moves = tf.is_tensor(leaf) and not self._shares_memory
        return tf.identity(leaf) if moves else tensor_of_array(leaf)

    def _at_home(self, function: Callable[..., Any], index: int, *args: object) -> Any:
        with tf.device(self._native_strategy.extended.worker_devices[index]):
            return function(*args)


_COMPOSITE = (tf.IndexedSlices, tf.SparseTensor, tf.RaggedTensor)


def _refuse_xla() -> None:
    if not tf.executing_eagerly() and compiles_with_xla():
        raise UnsupportedError(
            "Expected a function that is compiled without XLA, which on TensorFlow cannot compile "
            "code for several devices. Received: strategy.run in a function with jit_compile=True. "
            "Leave jit_compile out, or use KERAS_BACKEND=jax."
        )


def _elements(tensor: Any, axes: Sequence[int]) -> Any:
    sizes = tf.shape(tensor, out_type=tf.int64)
    return tf.reduce_prod(tf.gather(sizes, axes))
