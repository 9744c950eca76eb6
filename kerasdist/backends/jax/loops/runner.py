"""Runs user functions on a mesh by ``jax.shard_map``; reduces and gathers distributed values.

Each component of a distributed value is on its replica's devices, and each worker contributes the
components of its own replicas. All workers run the same program, so each worker must know the
shapes of all components.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, final

import jax
import keras
import numpy as np
from jax import numpy as jnp
from jax.sharding import PartitionSpec

from kerasdist import keras_compat
from kerasdist.api.options import ReduceOp
from kerasdist.api.replica_context import ReplicaContext
from kerasdist.api.values import DistributedValues, Mirrored, PerReplica, require_one_each
from kerasdist.backends.base.checks import checked_axes, checked_axis
from kerasdist.backends.base.runner import Runner
from kerasdist.backends.base.variable_rules import is_on_read
from kerasdist.backends.jax.loops import components, replica_scope, scopes
from kerasdist.backends.jax.loops.functions import Programs
from kerasdist.backends.jax.loops.ragged import Groups, Traced
from kerasdist.backends.jax.loops.replica_scope import Exchange, JaxCollectives, ReplicaScope
from kerasdist.backends.jax.loops.values import (
    Equal,
    Own,
    Source,
    Stacked,
    flatten,
    gathered,
    in_one_array,
    is_distributed,
    is_number,
    map_values,
    of_own,
    own,
    reduced,
    source_of,
    stacked,
)
from kerasdist.backends.jax.mesh.arrays import (
    cut,
    is_array,
    is_traced,
    largest_of,
    local_copy,
    padded,
)
from kerasdist.backends.jax.mesh.layout import AXIS
from kerasdist.backends.jax.mesh.placement import Placement
from kerasdist.core import context
from kerasdist.core.structures import Arguments, map_leaves, pack, transpose
from kerasdist.errors import DisagreementError, UnsupportedError
from kerasdist.input.sharding import bounds_of_replicas, examples, rows

if TYPE_CHECKING:
    from kerasdist.api.strategy import Strategy
    from kerasdist.backends.base.interface import ReplicaSet

_SHARED, _SHARDED = PartitionSpec(), PartitionSpec(AXIS)

# The code of a replica, as a function of the replica's scope and of the code's arguments.
_Body = Callable[[ReplicaScope, Arguments], Any]


@final
class JaxRunner(Runner):
    """Runs functions on the replicas, by one program for all devices."""

    def __init__(self, replica_set: ReplicaSet, place: Placement) -> None:
        self._replica_set = replica_set
        self._place = place
        self.places_ahead = self._place.places_ahead
        self._replicas = replica_set.num_replicas
        self._runs = Programs()
        self._updates = Programs()

    def run(self, strategy: Strategy, function: Callable[..., Any], given: Arguments) -> Any:
        """Runs the function once per replica: in the program being traced, or in a separate one."""

        def body(scope: ReplicaScope, given: Arguments) -> Any:
            replica = ReplicaContext(
                strategy=strategy,
                replica_id_in_sync_group=jax.lax.axis_index(AXIS),
                num_replicas_in_sync=self._replicas,
                collectives=JaxCollectives(scope, self._replicas),
            )
            with context.replica_scope(replica):
                return given.call(function)

        return self._started(self._runs, function, body, given)

    def _started(
        self, programs: Programs, function: Callable[..., Any], body: _Body, given: Arguments
    ) -> Any:
        """Runs `body` on each device, in the traced program or in the one kept for `function`."""
        if scopes.program() is not None:
            return self._on_each(body, given)

        def whole(*args: object, **kwargs: object) -> Any:
            return self._on_each(body, Arguments(args, kwargs))

        return programs.of(function)(whole, *self._entering(given))

    def _on_each(self, body: _Body, given: Arguments) -> Any:
        """Runs `body` on each device, as a part of the program that is being traced."""
        merging = replica_scope.current()
        if merging is not None:  # the code of a merge_call already runs on each device
            return of_own(body(merging, own(given)), self._replicas)
        program, outer = scopes.program(), scopes.current()
        assert program is not None
        assert outer is not None
        program.compute_on(self._place)
        leaves, structure = flatten(given)
        sources = [
            source_of(leaf, self._replicas) if is_distributed(leaf) else leaf for leaf in leaves
        ]
        sharded = {i: x.array for i, x in enumerate(sources) if isinstance(x, Stacked)}
        shared = {i: x.array for i, x in enumerate(sources) if isinstance(x, Equal)}
        shared |= {i: x for i, x in enumerate(sources) if is_array(x)}
        padded = {i: x.shapes for i, x in enumerate(sources) if isinstance(x, Stacked) and x.differ}
        # Lists, not dicts: JAX would sort dicts by their keys, which are ids and differ by worker.
        values = [outer.peek(one) for one in program.known.values()]
        held = [program.stack(one, self._replicas) for one in program.held.values()]
        found: list[tuple[Traced, dict[int, Any], list[int], list[int]]] = []

        def on_device(sharded: Any, shared: Any, known: Any, stacks: Any) -> Any:
            arrays = shared | {index: one[0] for index, one in sharded.items()}
            values = dict(zip(program.known, known, strict=True))
            values |= {key: one[0] for key, one in zip(program.held, stacks, strict=True)}

            def traced(shapes: Sequence[Any], exchange: Exchange) -> Traced:
                scope = ReplicaScope(values, program.held, outer, self._replicas, exchange)
                sizes = iter(shapes)
                own_leaves = [
                    cut(arrays[i], next(sizes)) if i in padded else arrays.get(i, x)
                    for i, x in enumerate(sources)
                ]
                with scope:
                    result = body(scope, jax.tree.unflatten(structure, own_leaves))
                    results, form = flatten(own(result))
                return Traced(scope, results, form)

            shapes: dict[int, Any] = {}
            if padded:
                groups = Groups(list(zip(*padded.values(), strict=True)))
                end, apart, shapes = groups.run(lambda group, how: traced(groups.kinds[group], how))
            else:
                end = traced((), Exchange())
                apart = {key: end.scope.peek(v) for key, v in end.scope.written_apart().items()}
            scope = end.scope.beside({}, Exchange(), ())
            written = end.scope.variables
            aggregates = scope.aggregates([written[key] for key in apart], list(apart.values()))
            new = {key: end.scope.peek(one) for key, one in written.items() if key not in apart}
            new |= dict(zip(apart, aggregates, strict=True))
            results = {i: jnp.asarray(x)[None] for i, x in enumerate(end.results) if is_array(x)}
            found.append((end, shapes, list(apart), list(new)))
            return results, [one[None] for one in apart.values()], list(new.values())

        arrays, stacks, new = jax.shard_map(
            on_device,
            mesh=self._place.mesh,
            axis_names={AXIS},
            in_specs=(_SHARDED, _SHARED, _SHARED, _SHARDED),
            out_specs=(_SHARDED, _SHARDED, _SHARED),
            check_vma=False,
        )(sharded, shared, values, held)
        end, shapes, apart, written = found[-1]
        stacks, new = dict(zip(apart, stacks, strict=True)), dict(zip(written, new, strict=True))
        for variable in end.scope.read.values():
            outer.get_current_value(variable)
        for key, variable in end.scope.variables.items():
            outer.store(variable, new[key], stacks.get(key))
        program.apart.update(end.scope.apart)
        wrapped = list(end.results)
        for index, array in arrays.items():
            wrapped[index] = PerReplica(Stacked(array, shapes.get(index, self._replicas)))
        return jax.tree.unflatten(end.form, wrapped)

    def reduce(self, op: ReduceOp, value: Any, axis: int | Sequence[int] | None) -> Any:
        """Returns the sum or mean of the components, also along axes if these are given."""
        source = self._source(value)
        axes = None if axis is None else checked_axes(source, axis)
        return self._launched(reduced, source, op, axes)

    def gather(self, value: Any, axis: int) -> Any:
        """Returns the components of a value, concatenated along an axis."""
        source = self._source(value)
        return self._launched(gathered, source, checked_axis(source, axis))

    def broadcast(self, tensor: Any) -> Any:
        """Puts a tensor on every device."""
        if isinstance(tensor, DistributedValues):
            return tensor
        return Mirrored(Equal(self._everywhere(tensor), self._replicas))

    def update(
        self, variable: keras.Variable, function: Callable[..., Any], given: Arguments
    ) -> Sequence[Any]:
        """Calls the function, which JAX traces once for the variable's copies on all devices."""
        scope = replica_scope.current()
        apart = self._has_components(variable)
        differ = apart or any(isinstance(leaf, PerReplica) for leaf in flatten(given)[0])
        given = Arguments((variable, *given.args), given.kwargs)
        if scope is not None:
            with scope.writing("copy" if differ else "equal"):
                result = own(given).call(function)
            return self.local_results(of_own(result, self._replicas))
        if not differ:
            whole = map_values(_array_of, given)
            return [whole.call(function)] * self._copies

        def body(scope: ReplicaScope, given: Arguments) -> Any:
            with context.replica_scope(None), scope.writing("copy"):
                return given.call(function)

        result = self._started(self._updates, function, body, given)
        leaves, form = flatten(result)
        parts = [self.local_results(leaf) for leaf in leaves]
        each = [one if len(one) == self._copies else one * self._copies for one in parts]
        columns = zip(*each, strict=True)
        return [jax.tree.unflatten(form, column) for column in columns] or [result] * self._copies

    def _has_components(self, variable: keras.Variable) -> bool:
        scope, program = replica_scope.current(), scopes.program()
        if scope is not None:
            return scope.is_apart(variable)
        if program is not None:
            return is_on_read(variable) or program.has_components(variable)
        return is_on_read(variable) or components.recall(variable) is not None

    def per_replica(self, values: Sequence[Any]) -> Any:
        """Returns a structure of distributed values with the given components."""
        all_here = self._replica_set.job is None or len(values) == self._replicas
        if scopes.program() is not None and all_here:
            return transpose(values, self._joined)
        columns: list[Sequence[Any]] = []
        transpose(values, columns.append)
        return self._place.wait_until_sent(pack(values[0], self._made(columns, is_array)))

    def divide(self, strategy: Strategy, batch: Any) -> Any:
        """Divides a batch into consecutive local batches; returns them as distributed values."""
        bounds = bounds_of_replicas(examples(batch), self._replicas)
        here = self._place.layout.local_replicas

        def divide(leaf: Any) -> Any:
            parts = [rows(leaf, *each) for each in bounds[here.start : here.stop]]
            if not is_array(leaf):
                return _of_objects(parts)
            sizes = [(end - begin,) if leaf.ndim else () for begin, end in bounds]
            return PerReplica(self._assembled(parts, [size + leaf.shape[1:] for size in sizes]))

        return self._place.wait_until_sent(map_leaves(divide, batch))

    def _assembled(self, here: Sequence[Any], shapes: Sequence[tuple[int, ...]]) -> Source:
        """Returns components in one array, to which this process contributes its own components."""
        largest = largest_of(shapes) if shapes[0] else ()
        parts = [padded(self._place.copy_if_shared(part), largest)[None] for part in here]
        # Even if JAX is tracing a program now, the array must not be a tracer, because it is also
        # used after the trace.
        with jax.ensure_compile_time_eval():
            array = self._place.assemble(parts, (self._replicas, *largest))
        return stacked(array, shapes)

    def _joined(self, leaves: Sequence[Any]) -> Any:
        """Makes a distributed value from the components of all replicas, one leaf per replica."""
        if not is_array(leaves[0]):
            return _of_objects(leaves)
        if replica_scope.current() is not None:
            return PerReplica(Own(jnp.stack(leaves)[jax.lax.axis_index(AXIS)], self._replicas))
        return in_one_array(PerReplica(tuple(leaves)))

    def _entering(self, structure: Any) -> Any:
        """Returns a program's arguments, in which distributed values have all workers' components.

        In a job, a distributed value that user code has made has only this worker's components, so
        the components of all workers are put together.
        """
        if self._replica_set.job is None:
            return structure
        leaves, form = flatten(structure)
        by_hand = [
            index
            for index, leaf in enumerate(leaves)
            if is_distributed(leaf) and not isinstance(leaf.source, Source)
        ]
        made = self._made([leaves[i].values for i in by_hand], is_number) if by_hand else []
        for index, value in zip(by_hand, made, strict=True):
            leaves[index] = value
        return jax.tree.unflatten(form, leaves)

    def _made(
        self, columns: Sequence[Sequence[Any]], has_shape: Callable[[Any], bool]
    ) -> list[Any]:
        """Makes a distributed value from each column, which has this worker's components.

        All workers must call this method, because they exchange the shapes of components.
        """
        if scopes.program() is not None:
            raise UnsupportedError(
                "Expected distributed values of several workers to be made outside of strategy.run "
                "and of a kerasdist.function: all workers run one program, and the values differ "
                "by worker. Received: a call in such a function. Make the value before the "
                "function runs, and pass it as an argument."
            )
        job, here = self._replica_set.job, len(self._place.layout.local_replicas)
        values: list[Any] = []
        arrays: dict[int, Sequence[Any]] = {}  # columns by their index
        for index, column in enumerate(columns):
            require_one_each(column, len(column), here)
            values.append(_of_objects(column))
            if all(map(has_shape, column)):
                arrays[index] = column
        own = [
            [[list(np.shape(part)), str(jnp.result_type(part))] for part in column]
            for column in arrays.values()
        ]
        everyone = [own]
        if job is not None:
            everyone = job.all_gather_object("components of a distributed value", own)
            counts = list(map(len, everyone))
            if len(set(counts)) > 1:
                raise DisagreementError(
                    f"{job.who} Expected as many arrays from all workers. Received: numbers of "
                    f"arrays={counts}, by worker. Make the same structure on every worker."
                )
        for index, *forms in zip(arrays, *everyone, strict=True):
            parts = [part for theirs in forms for part in theirs]
            if len({(len(shape), dtype) for shape, dtype in parts}) == 1:
                shapes = [tuple(shape) for shape, _ in parts]
                values[index] = PerReplica(self._assembled(arrays[index], shapes))
        return values

    def copies_of(self, variable: keras.Variable) -> tuple[Any, ...]:
        """Returns the value of a variable on each replica."""
        return self._components_of(variable).values

    @property
    def _copies(self) -> int:
        """How many components of a value the calling code sees.

        While a program is traced, this is one per replica, otherwise one per replica of this
        process.
        """
        if scopes.program() is not None:
            return self._replicas
        return len(self._place.layout.local_replicas)

    def _components_of(self, variable: keras.Variable) -> DistributedValues:
        scope, program = replica_scope.current(), scopes.program()
        if scope is not None:
            return PerReplica(Own(scope.peek(variable), self._replicas))
        if program is not None:
            current = scopes.current()
            assert current is not None
            current.get_current_value(variable)
            if is_on_read(variable):
                program.apart[id(variable)] = variable
            return PerReplica(Stacked(program.stack(variable, self._replicas), self._replicas))
        return PerReplica(Stacked(components.stack_on(variable, self._place), self._replicas))

    def _source(self, value: Any) -> Source:
        """Returns the components of a value or variable in one array."""
        if isinstance(value, keras.Variable):
            value = self._components_of(value)
        if not is_distributed(value):
            return Equal(self._everywhere(value), self._replicas)
        if scopes.program() is None:
            value = self._entering(value)
        return source_of(value, self._replicas)

    def _launched(self, function: Callable[..., Any], source: Source, *how: object) -> Any:
        """Applies a function to components: in the program being traced, or in a new program."""
        if scopes.program() is not None or is_traced(source.array):
            return function(source, *how)
        self._place.record(function.__qualname__, "of", source.array.dtype, source.array.shape)
        result = self._small(function, type(source), source.layout, how, source.array)
        self._place.after_launch(result, None)
        return local_copy(result)

    @cached_property
    def _small(self) -> Callable[..., Any]:
        def computed(function: Any, kind: Any, layout: Any, how: Any, array: Any) -> Any:
            return function(kind(array, layout), *how)

        return jax.jit(computed, static_argnums=(0, 1, 2, 3), out_shardings=self._place.whole)

    def _everywhere(self, tensor: Any) -> Any:
        tensor = keras_compat.ops.convert_to_tensor(tensor)
        return tensor if is_traced(tensor) else self._place.put(tensor, self._place.whole)


def _array_of(leaf: Any) -> Any:
    return local_copy(leaf.source.array) if is_distributed(leaf) else leaf


def _of_objects(leaves: Sequence[Any]) -> Any:
    """Returns a distributed value of Python objects.

    Returns None if the first object is None. If all objects are one and the same distributed value,
    returns that value.
    """
    first = leaves[0]
    same = all(leaf is first for leaf in leaves)
    alone = first is None or (same and is_distributed(first))
    return first if alone else PerReplica(tuple(leaves))
