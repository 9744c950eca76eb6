"""Sharded weights that are whole only where a step uses them (`sharding="full"`).

JAX keeps what an operation has read for the backward pass: each gathered weight, so the whole model
at once. So a traced step is gone through once more, operation by operation. There a gathered weight,
and what is made of weights alone (its cast, a part), is no array but a recipe: each operation that
reads it follows it anew, and gathers again.

Operations that read weights form groups, in their order: the weights of a group are one, or small
together. Those of the next group are gathered while one computes, not earlier, and both passes
gather for themselves; XLA's optimization barrier sees to that. So two groups are whole at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import jax
import numpy as np
from jax import numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
from jax.sharding import NamedSharding

from kerasdist.core.sharding import GROUP_BYTES

_MARK = "gathered by kerasdist"

# What is rather done again than kept: it moves elements, or changes each by itself.
_CHEAP = frozenset(
    "name sharding_constraint convert_element_type transpose reshape squeeze expand_dims "
    "broadcast_in_dim slice split concatenate pad rev copy copy_p neg abs sign add add_any sub mul "
    "div max min integer_pow square sqrt rsqrt clamp select_n".split()
)
_INLINED = frozenset({"jit", "pjit", "checkpoint", "remat", "remat2", "closed_call"})
_WITH_BODIES = frozenset({"scan", "while", "cond"})


def gather(shard: jax.Array, at_rest: NamedSharding, whole: NamedSharding) -> jax.Array:
    """Gathers a weight in a step; its gradient is scattered as the weight is."""
    constrain = jax.lax.with_sharding_constraint
    return constrain(constrain(checkpoint_name(shard, _MARK), at_rest), whole)


def in_groups(step: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Returns a step, of state and batch, that gathers weights for each use, group by group."""

    def run(state: object, batch: object) -> Any:
        # Of a new function, since JAX would not trace one again that it has traced.
        traced, form = jax.make_jaxpr(lambda *given: step(*given), return_shape=True)(state, batch)
        own, others = jax.tree.leaves(state), jax.tree.leaves(batch)
        is_state = [True] * len(own) + [False] * len(others)
        return jax.tree.unflatten(jax.tree.structure(form), _run(traced, own + others, is_state))

    return run


@final
@dataclass(eq=False)
class _Value:
    """A value of a step.

    Attributes:
        type: Its shape and type.
        maker: The operation that makes it; None: it is given.
        is_state: Whether it is made of the state alone.
        sources: Of which values a recipe makes it; empty: it is no recipe.
        array: The array, if it is no recipe, once there is one.
    """

    type: Any
    maker: _Operation | None = None
    is_state: bool = True
    sources: frozenset[_Value] = frozenset()
    array: Any = None

    @property
    def is_constant(self) -> bool:
        return (
            self.maker is None
            and self.array is not None
            and not isinstance(self.array, jax.core.Tracer)
        )


@final
@dataclass(eq=False)
class _Operation:
    """An operation on values, by its place in the step; `equation`: JAX's, None for a barrier."""

    equation: Any
    inputs: list[_Value]
    outputs: list[_Value] = field(default_factory=list)
    number: int = -1
    scatters: bool = False
    scattered: Sequence[NamedSharding | None] = ()

    @property
    def sources(self) -> frozenset[_Value]:
        """What has to be gathered for it."""
        return frozenset().union(*(one.sources for one in self.inputs))

    def apply(self, arrays: Sequence[Any]) -> Sequence[Any]:
        """Returns what it makes of arrays."""
        if self.equation is None:
            return jax.lax.optimization_barrier(list(arrays))
        if self.scattered:
            arrays = [
                array if one is None else jax.lax.with_sharding_constraint(array, one)
                for array, one in zip(arrays, self.scattered, strict=True)
            ]
        primitive, params = self.equation.primitive, self.equation.params
        if primitive.name in _WITH_BODIES and _has_mark(self.equation):
            is_state = [one.is_state for one in self.inputs]
            params = {key: _regrouped(value, is_state) for key, value in params.items()}
        bound = primitive.get_bind_params(params)
        functions, params = bound if isinstance(bound, tuple) else ((), bound)  # JAX before 0.10
        with jax.named_scope(str(self.equation.source_info.name_stack)), self.equation.ctx.manager:
            made = primitive.bind(*functions, *arrays, **params)
        return made if primitive.multiple_results else [made]


def _run(traced: ClosedJaxpr, arrays: Sequence[Any], is_state: Sequence[bool]) -> list[Any]:
    """Evaluates a traced function, whose weights are gathered in groups."""
    reader = _Reader()
    given = [
        _Value(jax.typeof(array), is_state=own, array=array)
        for array, own in zip(arrays, is_state, strict=True)
    ]
    results = reader.read(traced.jaxpr, traced.consts, given)
    return _Run(reader.operations).arrays(results)


@final
class _Reader:
    """Reads a traced function; what makes weights whole becomes recipes.

    Attributes:
        operations: The others, in their order.
    """

    def __init__(self) -> None:
        self.operations: list[_Operation] = []
        self._at_rest: dict[Any, NamedSharding] = {}  # of weights of a shape and type
        self._products: dict[Any, NamedSharding] = {}  # of low-rank products

    def read(self, jaxpr: Jaxpr, consts: Sequence[Any], given: Sequence[_Value]) -> list[_Value]:
        """Adds the operations of a function to those of the step; returns its results."""
        known: dict[Any, _Value] = dict(zip(jaxpr.invars, given, strict=True))
        known.update(zip(jaxpr.constvars, map(_constant, consts), strict=True))

        def value_of(atom: Any) -> _Value:
            return _constant(atom.val) if isinstance(atom, Literal) else known[atom]

        for equation in jaxpr.eqns:
            inputs = list(map(value_of, equation.invars))
            reads_weights = any(one.sources for one in inputs)
            if equation.primitive.name in _INLINED and (reads_weights or _has_mark(equation)):
                made = self._inline(equation, inputs)
            else:
                made = self._note(equation, inputs)
            known.update(zip(equation.outvars, made, strict=True))
        return list(map(value_of, jaxpr.outvars))

    def _inline(self, equation: Any, inputs: Sequence[_Value]) -> list[_Value]:
        if equation.params.get("differentiated") and equation.params.get("prevent_cse"):
            # Done again for the backward pass. As in JAX: apart from the forward pass.
            # Weights are kept apart where they are gathered.
            kept = [one for one in inputs if not (one.sources or _is_weight(one))]
            apart = dict(zip(kept, self._add(None, kept, [one.type for one in kept]), strict=True))
            inputs = [apart.get(one, one) for one in inputs]
        inner = next(_jaxprs(equation.params))
        if isinstance(inner, ClosedJaxpr):
            return self.read(inner.jaxpr, inner.consts, inputs)
        return self.read(inner, (), inputs)

    def _note(self, equation: Any, inputs: list[_Value]) -> list[_Value]:
        types = [one.aval for one in equation.outvars]
        if _is_mark(equation):
            inputs = [_recast(inputs[0])]
            return self._recipe(equation, inputs, types, inputs[0].sources or {inputs[0]})
        is_state = all(one.is_state for one in inputs) and not equation.effects
        is_recipe = equation.primitive.name in _CHEAP and any(one.sources for one in inputs)
        if is_state and (is_recipe or _is_low_rank(equation)):
            if not is_recipe:
                form = _form(types[0])
                self._products.update({form: self._at_rest[form]} if form in self._at_rest else {})
            parts = [one.sources or {one} for one in inputs if not one.is_constant]
            return self._recipe(equation, inputs, types, frozenset().union(*parts))
        return self._add(equation, inputs, types)

    def _recipe(
        self, equation: Any, inputs: list[_Value], types: Sequence[Any], sources: Any
    ) -> list[_Value]:
        operation = _Operation(equation, inputs)
        sources = frozenset(sources)
        if equation.primitive.name == "sharding_constraint":
            at_rest = equation.params["sharding"]
            if not at_rest.is_fully_replicated:
                self._at_rest[_form(types[0])] = at_rest
        operation.outputs = [_Value(one, operation, sources=sources) for one in types]
        return operation.outputs

    def _add(self, equation: Any, inputs: list[_Value], types: Sequence[Any]) -> list[_Value]:
        operation = _Operation(equation, inputs, number=len(self.operations))
        if equation is not None and _is_scatter(equation, inputs):
            operation.inputs, operation.scatters = inputs[0].maker.inputs, True
        elif equation is not None and equation.primitive.name == "dot_general":
            # Of the gradient of a low-rank product, as large as a weight: that of a factor.
            if any(one.is_state for one in inputs):
                found = [
                    None if one.is_state else self._products.get(_form(one.type)) for one in inputs
                ]
                if any(found):
                    operation.scattered, operation.scatters = found, True
        is_state = all(one.is_state for one in inputs)
        operation.outputs = [_Value(one, operation, is_state) for one in types]
        self.operations.append(operation)
        return operation.outputs


def _recast(value: _Value) -> _Value:
    """Lets the cast of a variable, as a mixed policy has it, be done again too."""
    maker = value.maker
    if value.sources or maker is None or maker.equation is None or not value.is_state:
        return value
    if maker.equation.primitive.name != "convert_element_type":
        return value
    again = _Operation(maker.equation, maker.inputs)
    again.outputs = [_Value(value.type, again, sources=frozenset(maker.inputs))]
    return again.outputs[0]


def _constant(array: Any) -> _Value:
    return _Value(jax.typeof(array), array=array)


@final
@dataclass
class _Group:
    """Operations that read weights, one after another, and what is gathered for them."""

    first: _Operation
    last: _Operation
    sources: frozenset[_Value]


def _groups(operations: Sequence[_Operation]) -> list[_Group]:
    groups: list[_Group] = []
    for one in operations:
        if not one.sources:
            continue
        together = one.sources | (groups[-1].sources if groups else frozenset())
        is_full = groups and together != groups[-1].sources and _bytes_of(together) > GROUP_BYTES
        if is_full or not groups:
            groups.append(_Group(one, one, one.sources))
        else:
            groups[-1].last, groups[-1].sources = one, together
    return groups


def _bytes_of(values: Any) -> int:
    return sum(math.prod(one.type.shape) * np.dtype(one.type.dtype).itemsize for one in values)


@final
class _Run:
    """Makes the arrays of operations, group by group."""

    def __init__(self, operations: Sequence[_Operation]) -> None:
        self._operations = operations
        self._groups = _groups(operations)
        self._shards: dict[_Value, Any] = {}  # of this group, and the next one
        self._whole: dict[_Value, Any] = {}  # of this group
        self._scattered: list[_Operation] = []  # for which no group has waited yet

    def arrays(self, results: Sequence[_Value]) -> list[Any]:
        """Runs all operations; returns the arrays of some values."""
        begins = {id(group.first): number for number, group in enumerate(self._groups)}
        for operation in self._operations:
            number = begins.get(id(operation))
            if number is not None:
                self._begin(number)
            made = operation.apply([self._array(one) for one in operation.inputs])
            for value, array in zip(operation.outputs, made, strict=True):
                value.array = array
            if operation.scatters:
                self._scattered.append(operation)
        return [self._array(one) for one in results]

    def _begin(self, number: int) -> None:
        """Drops the weights of the group before; lets those of the next one be gathered."""
        own = self._groups[number].sources
        following = self._groups[number + 1 :][:1]
        self._whole = {one: array for one, array in self._whole.items() if one.sources <= own}
        # What the step itself makes later is not there yet.
        self._shards = {one: array for one, array in self._shards.items() if one in own}
        wanted = [
            one for group in following for one in group.sources - own if one.array is not None
        ]
        ties = self._ties(number)
        if wanted and ties:
            arrays = [one.array for one in [*wanted, *ties]]
            arrays = jax.lax.optimization_barrier(arrays)
            self._shards.update(zip(wanted, arrays, strict=False))
            for one, array in zip(ties, arrays[len(wanted) :], strict=True):
                one.array = array

    def _ties(self, number: int) -> list[_Value]:
        """Returns what is there when a group begins, not when the one before did."""
        first = self._groups[number].first
        given = [one for one in first.inputs if not (one.sources or one.is_state)]
        if number == 0:
            return list(filter(_is_numeric, given))[:1]
        before = self._groups[number - 1]
        new = [one for one in given if one.maker and one.maker.number > before.last.number]
        ties = list(filter(_is_numeric, [*new, *before.last.outputs, *given]))[:1]
        # So are the gradients of the group before, scattered: they are not whole any more.
        ties += [one.outputs[0] for one in self._scattered]
        self._scattered.clear()
        return ties

    def _array(self, value: _Value) -> Any:
        if not value.sources:
            return value.array
        if value not in self._whole:
            operation = value.maker
            assert operation is not None
            made = operation.apply(list(map(self._part, operation.inputs)))
            self._whole.update(zip(operation.outputs, made, strict=True))
        return self._whole[value]

    def _part(self, value: _Value) -> Any:
        return self._shards[value] if value in self._shards else self._array(value)


def _is_weight(value: _Value) -> bool:
    return value.is_state and jnp.issubdtype(value.type.dtype, jnp.inexact)


def _form(type_: Any) -> Any:
    return type_.shape, type_.dtype


def _is_numeric(value: _Value) -> bool:
    return isinstance(value.type.dtype, np.dtype)


def _is_low_rank(equation: Any) -> bool:
    """Returns whether it is a product with more elements than its factors, as LoRA has it."""
    if equation.primitive.name != "dot_general":
        return False
    return _bytes_of_avals(equation.outvars) > _bytes_of_avals(equation.invars)


def _bytes_of_avals(atoms: Sequence[Any]) -> int:
    return sum(math.prod(one.aval.shape) * np.dtype(one.aval.dtype).itemsize for one in atoms)


def _is_mark(equation: Any) -> bool:
    return equation.primitive.name == "name" and equation.params["name"] == _MARK


def _is_scatter(equation: Any, inputs: Sequence[_Value]) -> bool:
    """Returns whether it is the transpose of `gather`, which sums and scatters a gradient."""
    if equation.primitive.name != "sharding_constraint":
        return False
    maker = inputs[0].maker
    return (
        not equation.params["sharding"].is_fully_replicated
        and maker is not None
        and maker.equation is not None
        and maker.equation.primitive.name == "sharding_constraint"
        and maker.equation.params["sharding"].is_fully_replicated
    )


def _jaxprs(params: Mapping[str, Any]) -> Iterator[Any]:
    for value in params.values():
        for one in value if isinstance(value, list | tuple) else [value]:
            if isinstance(one, Jaxpr | ClosedJaxpr):
                yield one


def _has_mark(equation: Any) -> bool:
    return _is_mark(equation) or any(
        _has_mark(each)
        for one in _jaxprs(equation.params)
        for each in (one.jaxpr if isinstance(one, ClosedJaxpr) else one).eqns
    )


def _regrouped(value: Any, is_state: Sequence[bool]) -> Any:
    """Returns the body of a loop, or a branch, whose weights are gathered in groups."""
    if isinstance(value, tuple):
        return tuple(_regrouped(one, is_state) for one in value)
    if not isinstance(value, ClosedJaxpr):
        return value
    types = value.in_avals
    known = is_state if len(is_state) == len(types) else [False] * len(types)
    return jax.make_jaxpr(lambda *arrays: _run(value, arrays, known))(*types)
