"""Running the user's functions on the replicas, and moving values across (contract C2)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, final
from weakref import WeakKeyDictionary

import tensorflow as tf

from kerasdist import context
from kerasdist.backends.checks import check_shapes, checked_axis
from kerasdist.backends.runner import Runner
from kerasdist.backends.tensorflow import datasets, reads
from kerasdist.backends.tensorflow import gradients as gradient_sums
from kerasdist.backends.tensorflow.collectives import TensorFlowCollectives
from kerasdist.backends.tensorflow.components import fitting, shape_of
from kerasdist.backends.tensorflow.engine_seam import (
    compiled_likewise,
    compiles_with_xla,
    converted_as_here,
)
from kerasdist.backends.tensorflow.exchange import Exchange
from kerasdist.backends.tensorflow.launch import in_replicas
from kerasdist.backends.tensorflow.values import (
    components,
    mirrored_on,
    regrouped,
    tensor_of_array,
    to_native,
    wrapped,
)
from kerasdist.backends.tensorflow.variables import native
from kerasdist.collectives import CommunicationOptions, ReduceOp
from kerasdist.errors import ScopeError, UnsupportedError
from kerasdist.input.dividing import divided
from kerasdist.replica_context import ReplicaContext
from kerasdist.structures import map_leaves, transpose

if TYPE_CHECKING:
    from kerasdist.backends.tensorflow.replicas import MirroredReplicas
    from kerasdist.input.options import InputOptions
    from kerasdist.strategy import Strategy

# Where results for code outside of the replicas go, as in tf.distribute.
_HOST = "/device:CPU:0"


@final
class TensorFlowRunner(Runner):
    """Functions run by ``tf.distribute``, in a graph or eagerly; values are the framework's own."""

    def __init__(self, replica_set: MirroredReplicas) -> None:
        """Makes the runner.

        Args:
            replica_set: The devices, and the engine that holds them together.
        """
        self._replica_set = replica_set
        self._group = replica_set.group
        self._engine = replica_set.group.engine
        self._shares_memory = replica_set.group.shares_memory
        self.places_ahead = not self._shares_memory
        # A function that is compiled already, compiled anew around all replicas.
        self._around: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()

    def run(
        self,
        strategy: Strategy,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Calls a function once a replica, each in a thread of the engine's."""
        self._group.note_loop()
        args, kwargs = to_native(self._engine, tuple(args)), to_native(self._engine, dict(kwargs))
        if isinstance(function, tf.types.experimental.PolymorphicFunction):
            # Replicas cannot meet in graphs of their own.
            return self._compiled_around(strategy, function)(*args, **kwargs)
        _refuse_xla()
        self._replica_set.begin_step()
        exchange = Exchange.of(self._group)
        converted = converted_as_here(function)

        def replica_code(replica: int, *args: Any, **kwargs: Any) -> Any:
            collectives = TensorFlowCollectives(exchange, replica, None)
            here = ReplicaContext(
                strategy=strategy,
                replica_id_in_sync_group=replica,
                num_replicas_in_sync=self._engine.num_replicas_in_sync,
                collectives=collectives,
            )
            with context.replica_scope(here), reads.preceded(collectives.mirror_before_read):
                return converted(*args, **kwargs)

        return regrouped(self._engine, in_replicas(self._group, replica_code, args, kwargs))

    def reduce(self, op: ReduceOp, value: Any, axis: int | Sequence[int] | None) -> Any:
        """Returns the sum or mean, on the host; a mean of integers is a float64, as always."""
        parts = self._tensors(value)
        if axis is None:
            # Slices of a variable's gradient are put together.
            dense = not any(isinstance(part, tf.IndexedSlices) for part in parts)
            columns = [self._fitting(parts) if dense else parts]
        else:
            axes = [checked_axis(parts[0], one) for one in _as_list(axis)]
            reduced = [self._at_home(tf.reduce_sum, i, p, axes) for i, p in enumerate(parts)]
            with tf.device(_HOST):
                columns = [self._fitting(reduced), [_elements(part, axes) for part in parts]]
        with tf.device(_HOST):
            total, *counted = self._group.sums(columns)
            count = counted[0] if counted else self._engine.num_replicas_in_sync
            return total if op is ReduceOp.SUM else gradient_sums.divided(total, count)

    def gather(self, value: Any, axis: int) -> Any:
        """Returns the components one after another, on the host."""
        parts = self._tensors(value)
        if isinstance(parts[0], tf.IndexedSlices):
            raise UnsupportedError(
                "Expected dense components. Received: value of tf.IndexedSlices. Convert them in "
                "the replicas with tf.convert_to_tensor, or gather their values and indices."
            )
        axis = checked_axis(parts[0], axis)
        with tf.device(_HOST):
            return self._group.concatenation(self._fitting(parts, axis), axis)[0]

    def reduce_to(
        self, op: ReduceOp, values: Sequence[Any], options: CommunicationOptions
    ) -> list[Any]:
        """Returns the sum or mean of each value, with a copy on every device."""
        parts = [self._fitting(self._tensors(value)) for value in values]
        sums = self._group.sums(parts, options, here=False)
        if op is ReduceOp.MEAN:
            count = self._engine.num_replicas_in_sync
            sums = [gradient_sums.divided(one, count) for one in sums]
        return [self.broadcast(one) for one in sums]

    def _fitting(self, parts: Sequence[Any], axis: int | None = None) -> Sequence[Any]:
        """Components that fit together; outside of a graph also with the other workers'.

        Collectives of other sizes would wait for each other. Scalars are taken as they are: to
        compare costs a fifth of a millisecond, and a loop reduces one per step.
        """
        fitting(parts, axis)
        job = self._replica_set.job
        if job is not None and tf.executing_eagerly() and parts[0].shape.rank != 0:
            here = [shape_of(part) for part in parts]
            everyone = job.exchange("shapes of components", here)
            check_shapes([shape for theirs in everyone for shape in theirs], axis)
        return parts

    def broadcast(self, tensor: Any) -> Any:
        """Returns a value with an equal component on every device."""
        if isinstance(tensor, tf.distribute.DistributedValues):
            return tensor
        return mirrored_on(self._engine, tensor)

    def update(
        self,
        variable: Any,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Sequence[Any]:
        """Calls the function for each copy of a variable, which it reads and writes alone.

        A variable of the framework is handed over as its copy on the device. A Keras variable is
        handed over as it is, and stands for that copy for the time of the call.
        """
        if not self.created(variable):
            raise ScopeError(
                "Expected a variable that was made in this strategy's scope. Received: "
                f"var={variable!r:.200}. Make it in `with strategy.scope():`."
            )
        converted = converted_as_here(function)
        is_native = native(variable) is variable
        results = []

        def update(copy: Any, *args: Any, **kwargs: Any) -> None:
            results.append(converted(copy if is_native else variable, *args, **kwargs))

        self._engine.extended.update(
            native(variable),
            tf.autograph.experimental.do_not_convert(update),
            args=to_native(self._engine, tuple(args)),
            kwargs=to_native(self._engine, dict(kwargs)),
        )
        return results

    def per_replica(self, values: Sequence[Any]) -> Any:
        """Returns a value with these components; arrays become tensors on their devices."""

        def placed(index: int, structure: Any) -> Any:
            return map_leaves(lambda leaf: self._at_home(self._tensor_here, index, leaf), structure)

        def merged(parts: Sequence[Any]) -> Any:
            return None if parts[0] is None else wrapped(self._engine, parts)

        return transpose([placed(index, one) for index, one in enumerate(values)], merged)

    def divide(self, batch: Any, replicas: int) -> Any:
        """Puts the pieces of a batch for the replicas of this process on their devices."""
        here = self._replica_set.local_replicas
        return self.per_replica(divided(batch, replicas)[here.start : here.stop])

    def local_results(self, value: Any) -> tuple[Any, ...]:
        """Returns the components."""
        value = to_native(self._engine, native(value))
        return tuple(self._engine.experimental_local_results(value))

    def read(self, variable: Any) -> Any:
        """Returns the variable's value; its aggregate, if it is aggregated on reading."""
        variable = native(variable)
        if isinstance(variable, tf.distribute.DistributedValues):
            variable = self._engine.extended.read_var(variable)
        return tf.convert_to_tensor(variable)

    def created(self, variable: Any) -> bool:
        """Returns whether the engine made the variable."""
        variable = native(variable)
        return isinstance(variable, tf.Variable) and (
            self._engine.extended.variable_created_in_scope(variable)
        )

    def distribute(self, dataset: Any, options: InputOptions) -> Any | None:
        """Returns the engine's distributed dataset for one of ``tf.data``."""
        return datasets.distribute(self._group, dataset, options)

    def distribute_own(self, dataset: Any, pieces: int, options: InputOptions) -> Any | None:
        """Returns the engine's dataset of the pieces of a worker's ``tf.data`` batches."""
        return datasets.distribute_own(self._engine, dataset, pieces, options)

    def distribute_pipelines(self, pipelines: Sequence[Any], options: InputOptions) -> Any | None:
        """Returns the engine's dataset of replicas' batches for those of ``tf.data``."""
        return datasets.distribute_pipelines(self._engine, pipelines, options)

    def _compiled_around(self, strategy: Strategy, function: Any) -> Any:
        if function not in self._around:
            inner = function.python_function

            def around(*args: Any, **kwargs: Any) -> Any:
                return self.run(strategy, inner, args, kwargs)

            self._around[function] = compiled_likewise(function, around)
        return self._around[function]

    def _tensors(self, value: Any) -> list[Any]:
        return [
            part if isinstance(part, _COMPOSITE) else tf.convert_to_tensor(part)
            for part in components(self._engine, value)
        ]

    def _tensor_here(self, leaf: Any) -> Any:
        moves = tf.is_tensor(leaf) and not self._shares_memory
        return tf.identity(leaf) if moves else tensor_of_array(leaf)

    def _at_home(self, function: Callable[..., Any], index: int, *args: Any) -> Any:
        with tf.device(self._engine.extended.worker_devices[index]):
            return function(*args)


_COMPOSITE = (tf.IndexedSlices, tf.SparseTensor, tf.RaggedTensor)


def _refuse_xla() -> None:
    if not tf.executing_eagerly() and compiles_with_xla():
        raise UnsupportedError(
            "Expected a function that is compiled without XLA, which on TensorFlow cannot compile "
            "code for several devices. Received: strategy.run in a function with jit_compile=True. "
            "Leave jit_compile out, or use KERAS_BACKEND=jax."
        )


def _as_list(axis: int | Sequence[int]) -> list[int]:
    return [axis] if isinstance(axis, int) else list(axis)


def _elements(tensor: Any, axes: Sequence[int]) -> Any:
    sizes = tf.shape(tensor, out_type=tf.int64)
    return tf.reduce_prod(tf.gather(sizes, axes))
