"""Gathers sharded weights only where a step uses them (`sharding="full"`).

For the backward pass JAX keeps the inputs of each operation. In a step these inputs include all
gathered weights, so each device would hold the entire model at once. Therefore the traced step is
evaluated once more, operation by operation, into a new trace. In this evaluation a gathered weight
is not an array but a recipe: the operations that make the array from shards. A value that is made
only of weights, such as a cast or a slice of a weight, is a recipe, too. Each operation that reads
a recipe carries out the recipe anew, and so gathers the weight again.

Consecutive operations that read weights form groups: a group reads one weight, or several small
weights. While one group computes, the weights of the next group are gathered, and the gradients of
the previous group are scattered. XLA's optimization barrier enforces this order, and also separates
the gathers of the forward pass from those of the backward pass. So at any time a device holds the
gathered weights of only two groups and the full gradients of one group.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, final

import jax
import numpy as np
from jax import numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from kerasdist.core.sharding import GROUP_BYTES

if TYPE_CHECKING:
    from jax.sharding import NamedSharding

_MARK = "gathered by kerasdist"

# Operations whose results are computed again instead of being kept, because they are cheap: they
# move elements, or change each element by itself.
_NAMES = (
    "name sharding_constraint convert_element_type transpose reshape squeeze expand_dims slice "
    "split broadcast_in_dim concatenate stack pad rev copy neg abs sign add sub mul div max min "
    "clamp select_n square integer_pow sqrt rsqrt and or xor not lt le gt ge eq ne "
    "shift_left shift_right_arithmetic shift_right_logical"  # to unpack int4
)
_CHEAP = frozenset(_NAMES.split())
_INLINED = frozenset({"jit", "pjit", "checkpoint", "remat", "remat2", "closed_call"})
_WITH_BODIES = frozenset({"scan", "while", "cond"})

_orders = itertools.count()

# The type of an operation in a traced function. JAX has no public name for this type.
_Equation = Any


def gather(shard: jax.Array, at_rest: NamedSharding, whole: NamedSharding) -> jax.Array:
    """Gathers a weight in a step; the weight's gradient is scattered to the same shards."""
    constrain = jax.lax.with_sharding_constraint
    return constrain(constrain(checkpoint_name(shard, _MARK), at_rest), whole)


def in_groups(step: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Returns a function that computes the same as `step`, but gathers weights group by group."""

    def run(state: object, batch: object) -> Any:
        # `partial` makes a new function, because JAX would not trace the same function again.
        traced, form = jax.make_jaxpr(partial(step), return_shape=True)(state, batch)
        own, others = jax.tree.leaves(state), jax.tree.leaves(batch)
        is_state = [True] * len(own) + [False] * len(others)
        return jax.tree.unflatten(jax.tree.structure(form), _run(traced, own + others, is_state))

    return run


@final
@dataclass(eq=False)
class _Value:
    """A value of the traced step: an array, or a recipe by which an array is made.

    Attributes:
        type: The value's shape and type.
        maker: The operation that makes the value; None if the value is an input.
        is_state: Whether the value depends only on the step's state, and not on its batch.
        is_constant: Whether the value is a number or an array in the code.
        sources: The weights from which this value is made, if it is a recipe; otherwise empty.
        array: The value's array, once it is computed; always None for a recipe.
        order: A number that grows with each new value. Workers sort values by this number, so the
            order is the same on all workers.
    """

    type: Any
    maker: _Operation | None = None
    is_state: bool = True
    is_constant: bool = False
    sources: frozenset[_Value] = frozenset()
    array: jax.Array | None = None
    order: int = field(default_factory=_orders.__next__)

    @property
    def form(self) -> Hashable:
        """The value's shape and type."""
        return self.type.shape, self.type.dtype


@final
@dataclass(eq=False)
class _Operation:
    """An operation on values of the step.

    Attributes:
        equation: The operation in JAX's form; None for an optimization barrier.
        number: The position among the operations that make arrays; -1 if the operation belongs to
            a recipe.
        shards: How each input is sharded before the operation; None for an input that stays as it
            is.
        scatters: Whether the operation makes shards from full values; if so, the next group waits
            for these shards.
    """

    equation: _Equation | None
    inputs: Sequence[_Value]
    outputs: list[_Value] = field(default_factory=list)
    number: int = -1
    shards: Sequence[NamedSharding | None] = ()
    scatters: bool = False

    @property
    def sources(self) -> frozenset[_Value]:
        """The weights that must be gathered for this operation."""
        return frozenset().union(*(one.sources for one in self.inputs))

    def apply(self, arrays: Sequence[object]) -> Sequence[jax.Array]:
        """Returns the operation's results for these inputs."""
        equation = self.equation
        if equation is None:
            return jax.lax.optimization_barrier(list(arrays))
        if self.shards:
            pairs = zip(arrays, self.shards, strict=True)
            arrays = [
                array if how is None else jax.lax.with_sharding_constraint(array, how)
                for array, how in pairs
            ]
        params: Any = equation.params
        if equation.primitive.name in _WITH_BODIES and _has_mark(equation):
            is_state = [one.is_state for one in self.inputs]
            params = {key: _regrouped(value, is_state) for key, value in params.items()}
        bound: Any = equation.primitive.get_bind_params(params)
        # In some versions of JAX `get_bind_params` returns functions besides the parameters.
        functions, params = bound if isinstance(bound, tuple) else ((), bound)
        with jax.named_scope(str(equation.source_info.name_stack)), equation.ctx.manager:
            made = equation.primitive.bind(*functions, *arrays, **params)
        return made if equation.primitive.multiple_results else [made]


def _run(traced: Any, arrays: Sequence[jax.Array], is_state: Sequence[bool]) -> list[object]:
    """Evaluates a traced function so that the weights that it uses are gathered in groups."""
    reader = _Reader()
    given = [
        _Value(jax.typeof(array), is_state=own, array=array)
        for array, own in zip(arrays, is_state, strict=True)
    ]
    results = reader.read(traced.jaxpr, traced.consts, given)
    return _Run(reader.operations).arrays(results)


@final
class _Reader:
    """Reads a traced function. Lists operations that make arrays, and turns others into recipes.

    Attributes:
        operations: The operations that make arrays, in order.
    """

    def __init__(self) -> None:
        self.operations: list[_Operation] = []
        # Both dicts map the shape and type of a weight to the weight's sharding. `_products` has
        # only the shapes and types that a product of two weights also has, as in LoRA.
        self._at_rest: dict[Hashable, NamedSharding] = {}
        self._products: dict[Hashable, NamedSharding] = {}

    def read(self, jaxpr: Any, consts: Sequence[object], given: Sequence[_Value]) -> list[_Value]:
        """Adds a function's operations to those of the step; returns the function's results."""
        known: dict[object, _Value] = dict(zip(jaxpr.invars, given, strict=True))
        known.update(zip(jaxpr.constvars, map(_constant, consts), strict=True))

        def value_of(atom: Any) -> _Value:
            return _constant(atom.val) if hasattr(atom, "val") else known[atom]

        for equation in jaxpr.eqns:
            inputs = list(map(value_of, equation.invars))
            reads_weights = any(one.sources for one in inputs)
            if equation.primitive.name in _INLINED and (reads_weights or _has_mark(equation)):
                made = self._inline(equation, inputs)
            else:
                made = self._note(equation, inputs)
            known.update(zip(equation.outvars, made, strict=True))
        return list(map(value_of, jaxpr.outvars))

    def _inline(self, equation: _Equation, inputs: Sequence[_Value]) -> list[_Value]:
        if equation.params.get("differentiated") and equation.params.get("prevent_cse"):
            # `jax.checkpoint` repeats operations of the forward pass in the backward pass. As in
            # JAX, a barrier keeps XLA from merging the repeated operations with the first ones.
            # Weights do not pass through this barrier, because `_Run` orders their gathers.
            apart = [one for one in inputs if not (one.sources or _is_weight(one))]
            made = self._add(_Operation(None, apart), [one.type for one in apart])
            again = dict(zip(apart, made, strict=True))
            inputs = [again.get(one, one) for one in inputs]
        inner = next(inner_programs(equation.params))
        if _has_constants(inner):
            return self.read(inner.jaxpr, inner.consts, inputs)
        return self.read(inner, (), inputs)

    def _note(self, equation: _Equation, inputs: list[_Value]) -> list[_Value]:
        types: list[Any] = [one.aval for one in equation.outvars]
        name = equation.primitive.name
        if _is_mark(equation):
            source = _recast(inputs[0])
            return _recipe(equation, [source], types, source.sources or frozenset({source}))
        is_state = all(one.is_state for one in inputs) and not equation.effects
        reads_weights = any(one.sources for one in inputs)
        is_cheap = name in _CHEAP and reads_weights
        if is_state and (is_cheap or _expands(equation)):
            parts = [one.sources or {one} for one in inputs if not one.is_constant]
            made = _recipe(equation, inputs, types, frozenset().union(*parts))
            self._note_shardings(equation, made[0].form)
            return made
        operation = _Operation(equation, inputs)
        if _scatters(equation, inputs):
            operation.scatters = True
        elif name == "dot_general" and any(one.is_state for one in inputs):
            # In LoRA the gradient of a factor is computed from the full gradient of the product of
            # the factors. That full gradient is sharded before this operation reads it.
            shards = [None if one.is_state else self._products.get(one.form) for one in inputs]
            if any(shards):
                operation.shards, operation.scatters = shards, True
        return self._add(operation, types)

    def _note_shardings(self, equation: _Equation, form: Hashable) -> None:
        if _constraint(equation) is False:
            self._at_rest[form] = equation.params["sharding"]
        elif equation.primitive.name == "dot_general" and form in self._at_rest:
            self._products[form] = self._at_rest[form]

    def _add(self, operation: _Operation, types: Sequence[Any]) -> list[_Value]:
        operation.number = len(self.operations)
        self.operations.append(operation)
        is_state = all(one.is_state for one in operation.inputs)
        operation.outputs = [_Value(one, operation, is_state) for one in types]
        return operation.outputs


def _constant(array: Any) -> _Value:
    return _Value(jax.typeof(array), is_constant=True, array=array)


def _recipe(
    equation: _Equation, inputs: list[_Value], types: Sequence[Any], sources: frozenset[_Value]
) -> list[_Value]:
    operation = _Operation(equation, inputs)
    operation.outputs = [_Value(one, operation, sources=sources) for one in types]
    return operation.outputs


def _recast(value: _Value) -> _Value:
    """Replaces a value by a recipe if the value is a variable cast to another type.

    Mixed precision makes such casts. Other values are returned unchanged.
    """
    cast = (
        None if value.maker is None or value.sources or not value.is_state else value.maker.equation
    )
    if cast is None or value.maker is None or cast.primitive.name != "convert_element_type":
        return value
    inputs = list(value.maker.inputs)
    return _recipe(cast, inputs, [value.type], frozenset(inputs))[0]


def _is_weight(value: _Value) -> bool:
    return value.is_state and jnp.issubdtype(value.type.dtype, jnp.inexact)


def _expands(equation: _Equation) -> bool:
    """Returns whether a product or a lookup makes more elements than it reads.

    Examples are the product of the two factors of LoRA, and the lookup of scales in a quantized
    model, where several elements of a weight share a scale.
    """
    if equation.primitive.name not in ("dot_general", "gather"):
        return False
    types: list[Any] = [one.aval for one in (*equation.outvars, *equation.invars)]
    made, *given = (math.prod(one.shape) for one in types)
    return made > sum(given)


def _scatters(equation: _Equation, inputs: Sequence[_Value]) -> bool:
    """Returns whether an operation is the transpose of `gather`: it scatters a full gradient."""
    before = None if not inputs or inputs[0].maker is None else inputs[0].maker.equation
    ends, begins = (_constraint(one) for one in (equation, before))
    return begins is not None and ends is not None and begins and not ends


def _constraint(equation: _Equation | None) -> bool | None:
    """Returns whether a sharding constraint makes an array full on each device.

    Returns None if the operation is not a sharding constraint.
    """
    if equation is None or equation.primitive.name != "sharding_constraint":
        return None
    return bool(equation.params["sharding"].is_fully_replicated)


@final
@dataclass
class _Group:
    """Consecutive operations that read weights, and the weights that are gathered for them."""

    first: _Operation
    last: _Operation
    sources: frozenset[_Value]


def _groups(operations: Iterable[_Operation]) -> list[_Group]:
    groups: list[_Group] = []
    for one in operations:
        if not one.sources:
            continue
        together = one.sources.union(*(group.sources for group in groups[-1:]))
        is_more = not groups or together != groups[-1].sources
        if not groups or (is_more and _bytes_of(together) > GROUP_BYTES):
            groups.append(_Group(one, one, one.sources))
        else:
            groups[-1].last, groups[-1].sources = one, together
    return groups


def _bytes_of(values: Iterable[_Value]) -> int:
    return sum(math.prod(one.type.shape) * np.dtype(one.type.dtype).itemsize for one in values)


@final
class _Run:
    """Computes the arrays of the operations, group by group."""

    def __init__(self, operations: Sequence[_Operation]) -> None:
        self._operations = operations
        self._groups = _groups(operations)
        self._shards: dict[_Value, jax.Array] = {}  # shards of weights of this and the next group
        self._whole: dict[_Value, jax.Array] = {}  # gathered weights of this group
        self._scattered: list[_Value] = []  # gradients for which no group has waited yet

    def arrays(self, results: Sequence[_Value]) -> list[object]:
        """Runs all operations; returns the arrays of the step's results."""
        begins = {group.first.number: number for number, group in enumerate(self._groups)}
        for operation in self._operations:
            if operation.number in begins:
                self._begin(begins[operation.number])
            made = operation.apply([self._array(one) for one in operation.inputs])
            for value, array in zip(operation.outputs, made, strict=True):
                value.array = array
            if operation.scatters:
                self._scattered += operation.outputs
        return [self._array(one) for one in results]

    def _begin(self, number: int) -> None:
        """Drops the previous group's gathered weights; allows the next group's gathers to start."""
        own = self._groups[number].sources
        self._whole = {one: array for one, array in self._whole.items() if one.sources <= own}
        self._shards = {one: array for one, array in self._shards.items() if one in own}
        following = frozenset().union(*(one.sources for one in self._groups[number + 1 :][:1]))
        # A weight that the step itself computes later has no array yet, and is left out.
        wanted = [one for one in following - own if one.array is not None]
        wanted.sort(key=lambda one: one.order)
        ties = self._ties(number)
        if wanted and ties:
            arrays = jax.lax.optimization_barrier([one.array for one in [*wanted, *ties]])
            self._shards.update(zip(wanted, arrays, strict=False))
            for one, array in zip(ties, arrays[len(wanted) :], strict=True):
                one.array = array

    def _ties(self, number: int) -> list[_Value]:
        """Returns values for which the gathers of the next group must wait.

        If possible, one of the values is computed only just before this group begins, so that the
        gathers do not start earlier.
        """
        first, before = self._groups[number].first, self._groups[max(number - 1, 0)]
        given = [one for one in first.inputs if not (one.sources or one.is_state)]
        since = before.last.number if number else -1
        new = [one for one in given if number == 0 or (one.maker and one.maker.number > since)]
        made = before.last.outputs if number else []
        ties = [one for one in (*new, *made, *given) if isinstance(one.type.dtype, np.dtype)][:1]
        ties += self._scattered
        self._scattered = []
        return ties

    def _array(self, value: _Value) -> jax.Array | None:
        if not value.sources:
            return value.array
        if value not in self._whole:
            recipe = value.maker
            assert recipe is not None
            made = recipe.apply([self._part(one) for one in recipe.inputs])
            self._whole.update(zip(recipe.outputs, made, strict=True))
        return self._whole[value]

    def _part(self, value: _Value) -> jax.Array | None:
        return self._shards[value] if value in self._shards else self._array(value)


def _is_mark(equation: _Equation) -> bool:
    return equation.primitive.name == "name" and equation.params["name"] == _MARK


def inner_programs(params: Mapping[str, object]) -> Iterator[Any]:
    """Yields the traced functions that an operation has as parameters, such as a loop's body."""
    for value in params.values():
        for one in value if isinstance(value, list | tuple) else [value]:
            if hasattr(one, "eqns"):
                yield one


def _has_constants(program: object) -> bool:
    return hasattr(program, "consts")


def _has_mark(equation: _Equation) -> bool:
    return _is_mark(equation) or any(
        _has_mark(each) for one in inner_programs(equation.params) for each in one.eqns
    )


def _regrouped(value: Any, is_state: Sequence[bool]) -> object:
    """Returns the body of a loop or branch, changed so that weights are gathered in groups."""
    if isinstance(value, tuple):
        return tuple(_regrouped(one, is_state) for one in value)
    if not _has_constants(value):
        return value
    types = value.in_avals
    known = is_state if len(is_state) == len(types) else [False] * len(types)
    return jax.make_jaxpr(lambda *arrays: _run(value, arrays, known))(*types)
