"""Where the arrays of a step live with several workers, whose devices form one mesh."""

from __future__ import annotations

import hashlib
import itertools
import operator
from collections.abc import Callable, Generator, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, final

import jax
import numpy as np
from jax import numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from kerasdist import keras_compat
from kerasdist.agreement import results
from kerasdist.agreement.results import checksum_of
from kerasdist.backends.jax.mesh.arrays import is_placed, is_traced, text_of
from kerasdist.backends.jax.mesh.exchange import ByName
from kerasdist.backends.jax.mesh.layout import AXIS, Layout
from kerasdist.backends.jax.mesh.placement import MeshPlacement, Step, moved
from kerasdist.core.sharding import HeldPiece, Region
from kerasdist.job.job import Job

_assembled = jax.make_array_from_single_device_arrays

# How many bytes of variables are on the host a second time, or the largest variable.
_BUNDLE = 1 << 26

# The most bytes that a device gets at a time of what workers exchange from host to host.
_CHUNK = 1 << 26


@partial(jax.tree_util.register_dataclass, data_fields=["array"], meta_fields=["count"])
@dataclass(frozen=True)
class _Rows:
    """An output of `predict`: `count` rows, and others to divide it evenly over the replicas."""

    array: Any
    count: int


@final
class WorkerPlacement(MeshPlacement):
    """Keeps variables as global arrays in programs, as host-local arrays between programs.

    All processes must take part when one of them computes with a global array. Between programs a
    process may do something alone, such as saving, so variables are host-local arrays then, whole
    on each device of the process. Both kinds of arrays use the same buffers: converting one to the
    other copies nothing. Only a variable that the replicas divide stays a global array.

    Each worker has the same batch, and contributes the rows of its own replicas.
    """

    def __init__(self, layout: Layout, job: Job) -> None:
        super().__init__(layout)
        self._job = job
        self.places_ahead = True
        self._is_sole = len(layout.local) == 1
        self._here: Sharding = (
            SingleDeviceSharding(layout.local[0])
            if self._is_sole
            else NamedSharding(Mesh(list(layout.local), (AXIS,)), PartitionSpec())
        )

    def to_rest(self, arrays: list[Any], variables: Sequence[Any]) -> list[Any]:
        """Converts global arrays to host-local ones, and moves others here in one transfer.

        A variable that the replicas divide becomes a global array, if it is none.
        """
        if self.layout.rule is None:
            return moved(self.from_program(arrays), [self._here] * len(arrays))
        at_rest = list(arrays)
        targets = self.layout.of_variables(variables)
        whole = [index for index, target in enumerate(targets) if target is self.whole]
        moved_here = moved(self.from_program([arrays[i] for i in whole]), [self._here] * len(whole))
        for index, array in zip(whole, moved_here, strict=True):
            at_rest[index] = array
        for index, target in enumerate(targets):
            if target is not self.whole:
                at_rest[index] = self.scattered(arrays[index], target)
        return at_rest if any(map(operator.is_not, at_rest, arrays)) else arrays

    def to_program(self, arrays: list[Any], variables: Sequence[Any]) -> list[Any]:
        """Converts host-local arrays to global ones, which are whole."""
        del variables
        return [
            _assembled(one.shape, self.whole, self._parts(one)) if one.is_fully_addressable else one
            for one in arrays
        ]

    def from_program(self, arrays: list[Any]) -> list[Any]:
        """Converts whole global arrays to host-local ones; returns the same list if there is none.

        Those that are divided stay global.
        """
        if all(one.is_fully_addressable for one in arrays):
            return arrays
        return [
            one if one.is_fully_addressable or is_divided(one) else self._local(one)
            for one in arrays
        ]

    @contextmanager
    def together(self, work: str, fact: Callable[[], Any]) -> Generator[bool]:
        """Waits for all workers before common work; yields whether `fact()` is equal on all."""
        with self._job.translating_failures(work):
            digest = hashlib.sha256(repr(fact()).encode()).hexdigest()
            yield not any(self._job.compare_objects(work, digest))

    def scattered(self, array: Any, sharding: NamedSharding) -> Any:
        """Makes a divided array, to which this worker contributes its parts of a whole one."""
        if is_placed(array, sharding):
            return array
        array = self.result(array)
        return array if sharding.is_fully_replicated else self._cut(array, sharding)

    def gathered(self, array: Any) -> Any:
        """Returns the whole value of a divided variable. All workers must call it."""
        return self.result(self._gather(array))

    def wholly(self, state: Any) -> Any:
        """Returns state as host-local arrays. All workers must call it, if some is divided."""
        return jax.tree.map(
            lambda one: self.gathered(one) if is_divided(one) else self.result(one), state
        )

    @cached_property
    def _gather(self) -> Any:
        return jax.jit(lambda arrays: arrays, out_shardings=self.whole)

    def _parts(self, array: Any) -> list[Any]:
        """Returns the shards of an array on this process's devices."""
        return [array] if self._is_sole else [shard.data for shard in array.addressable_shards]

    def _local(self, array: Any) -> Any:
        if self._is_sole:
            return array.addressable_data(0)
        return _assembled(array.shape, self._here, self._parts(array))

    def here(self, leaf: Any) -> Any:
        """Returns the rows of a global array that one of this process's devices holds."""
        if not isinstance(leaf, jax.Array) or is_traced(leaf) or leaf.is_fully_addressable:
            return leaf
        return jax.device_put(leaf.addressable_data(0), self._here)

    def result(self, array: Any) -> Any:
        """Returns a program's result as a host-local array."""
        return self.from_program([array])[0]

    def _results(self, outputs: Any) -> Any:
        def result(leaf: Any) -> Any:
            return self._collected(leaf) if isinstance(leaf, _Rows) else self.result(leaf)

        return jax.tree.map(result, outputs, is_leaf=lambda leaf: isinstance(leaf, _Rows))

    def _collected(self, rows: _Rows) -> np.ndarray[Any, Any]:
        array = jax.block_until_ready(rows.array)  # NumPy's own wait would drop a Ctrl-C
        shards = {shard.index[0].start or 0: shard.data for shard in array.addressable_shards}
        here = [np.asarray(shards[begin]) for begin in sorted(shards)]
        return self.rows_of_all(np.concatenate(here))[: rows.count]

    def equalize(self, variables: Sequence[Any]) -> None:
        """Gives variables the chief's values, bit by bit. All workers must call it."""
        for bundle in _bundles(variables):
            arrays = [keras_compat.stored_value(one) for one in bundle]
            values = [np.asarray(array.addressable_data(0)) for array in arrays]
            own = [np.ascontiguousarray(value).reshape(-1).view(np.uint8) for value in values]
            ends = np.cumsum([one.size for one in own])
            chiefs = np.split(self._of_chief(np.concatenate(own)), ends[:-1])
            for variable, value, mine, new in zip(bundle, values, own, chiefs, strict=True):
                if not np.array_equal(mine, new):
                    with self.variables():
                        array = jnp.array(new.view(value.dtype).reshape(value.shape))
                    keras_compat.store_value(variable, array)

    def rows_of_all(self, rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Returns the rows of all workers, on the host; each replica has equally many.

        All workers must call it.
        """
        replicas, here = self.layout.replicas, len(self.layout.local_replicas)
        own = np.ascontiguousarray(rows).reshape(here, -1).view(np.uint8)
        data = self._exchanged(
            own,
            max(_CHUNK // replicas, 1),
            lambda chunk: self._gather(self.chosen_rows(chunk, replicas)),
        )
        return data.view(rows.dtype).reshape(len(rows) // here * replicas, *rows.shape[1:])

    def _of_chief(self, data: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Returns the chief's bytes, on the host; each worker has as many. All must call it."""
        return self._exchanged(data, _CHUNK, lambda chunk: self._chiefs(self._whole(chunk)))

    def _exchanged(
        self, data: np.ndarray[Any, Any], most: int, exchange: Callable[[Any], Any]
    ) -> np.ndarray[Any, Any]:
        """Exchanges bytes with the other workers, in chunks along the last axis."""
        results = [np.empty((self.layout.replicas, 0)[-data.ndim :], np.uint8)]
        for begin in range(0, data.shape[-1], most):
            chunk = data[..., begin : begin + most]
            size = chunk.shape[-1]
            # Of powers of two there are few, and JAX compiles the program for each size.
            room = [(0, 0)] * (data.ndim - 1) + [(0, (1 << (size - 1).bit_length()) - size)]
            result = jax.block_until_ready(exchange(np.pad(chunk, room)))
            results.append(np.asarray(result.addressable_data(0))[..., :size])
        return np.concatenate(results, axis=-1)

    @cached_property
    def _chiefs(self) -> Any:
        whole = PartitionSpec()
        return jax.jit(
            jax.shard_map(
                ByName().first, mesh=self.mesh, in_specs=whole, out_specs=whole, check_vma=False
            )
        )

    def argument(self, array: Any) -> Any:
        """Makes a global array of the workers' arrays; returns a global array unchanged."""
        if isinstance(array, jax.Array) and not array.is_fully_addressable:
            return array
        return self.everywhere(array)

    def everywhere(self, array: Any) -> Any:
        """Makes a global array of the workers' arrays, which should be equal."""
        return self._whole(self.lasting(array))

    def spread(self, stack: Any) -> Any:
        """Sends each of this process's devices its element along axis 0."""
        return self._cut(stack, self.pieces)

    def batch(self, batch: Any, axis: int = 0) -> Any:
        """Contributes the rows of this worker's replicas; all rows if they cannot be divided."""
        leaves = jax.tree.leaves(batch)
        target = self.layout.entry(leaves, axis)
        if all(is_placed(leaf, target) for leaf in leaves):
            return batch
        if target is self.whole:
            return jax.tree.map(self.everywhere, batch)
        return jax.tree.map(lambda leaf: self._cut(leaf, target), batch)

    def chosen(self, numbers: Any) -> Any:
        """Returns the numbers of this worker's rows of a batch, all if it cannot be divided."""
        share, rest = divmod(len(numbers), self.layout.replicas)
        here = self.layout.local_replicas
        return numbers if rest else numbers[here.start * share : here.stop * share]

    def chosen_rows(self, batch: Any, total: int) -> Any:
        """Makes a global batch of `total` rows; `batch` has those that `chosen` selected here."""
        if total % self.layout.replicas:
            return jax.tree.map(self._whole, batch)

        def assembled(leaf: Any) -> Any:
            here = len(self.layout.local_replicas)
            share = leaf.shape[0] // here
            parts = [leaf[i * share : (i + 1) * share] for i in range(here)]
            return self._joined(self.layout.by_device(parts), (total, *leaf.shape[1:]), self.pieces)

        return jax.tree.map(assembled, batch)

    def _whole(self, leaf: Any) -> Any:
        return self.to_program([self.sent(jax.device_put(leaf, self._here))], [None])[0]

    def _cut(self, array: Any, target: NamedSharding) -> Any:
        """Makes a global array; this worker contributes its devices' parts of a whole one."""
        places = target.addressable_devices_indices_map(array.shape)
        parts = [self.lasting(array[places[device]]) for device in self.layout.local]
        return self._joined(parts, array.shape, target)

    def _joined(self, parts: list[Any], shape: Any, target: NamedSharding) -> Any:
        placed = jax.device_put(parts, list(self.layout.local))
        return _assembled(shape, target, self.sent(placed))

    def eager(self, step: Step) -> Step:
        """Lets each worker run the step alone, with the whole batch."""

        def run(state: Any, batch: Any) -> tuple[Any, Any]:
            self.note_batch(_shapes(batch))
            outputs, new = step(self.wholly(state), self.at_rest(self._gather(batch)))
            return outputs, self._divided_as(state, new)

        return run

    def _note_step(self, program: Any, state: Any, batch: Any, seen: dict[Hashable, str]) -> None:
        form = _shapes(batch)
        if seen and form not in seen:
            # Without waiting for the others, whose batch may have another shape.
            digest = results.digest_of(text_of(program.lower(state, batch)))
            seen[form] = f"program {digest[:12]}"
        if form in seen:
            self.note_batch(f"{form} {seen[form]}" if seen[form] else form)
            return
        self.note_batch(form)
        self.compare(program, state, batch)
        seen[form] = ""

    def compare(self, program: Any, *arguments: Any) -> None:
        """Raises DisagreementError if other workers have another program."""
        # JAX caches the lowered program, so the call does not lower it again.
        results.require_equal_programs(self._job, text_of(program.lower(*arguments)))

    def _output_sharding(self, leaf: Any) -> NamedSharding:
        del leaf
        return self.whole

    def _returned_rows(self, leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array) or not leaf.ndim or len(leaf) < self.layout.replicas:
            return self._returned(leaf)
        missing = [(0, -len(leaf) % self.layout.replicas)] + [(0, 0)] * (leaf.ndim - 1)
        rows = jax.lax.with_sharding_constraint(jnp.pad(leaf, missing), self.pieces)
        return _Rows(rows, len(leaf))


def _bundles(variables: Sequence[Any]) -> Iterator[list[Any]]:
    ends = itertools.accumulate(keras_compat.stored_value(one).nbytes for one in variables)
    pairs = zip(ends, variables, strict=True)
    for _, bundle in itertools.groupby(pairs, lambda pair: pair[0] // _BUNDLE):
        yield [variable for _, variable in bundle]


def checksums_of(values: Sequence[Any]) -> list[int]:
    """Returns a checksum of each array's bits in this process."""
    own = [value.addressable_data(0) for value in values]
    if all(value.platform() == "cpu" for value in own):
        return [checksum_of(value) for value in own]  # no copy, and nothing to compile
    return [int(one) for one in jax.device_get([_sum_of_bits(value) for value in own])]


@jax.jit
def _sum_of_bits(value: Any) -> Any:
    kind = jnp.uint8 if value.dtype.itemsize == 1 else jnp.uint16
    whole = value.astype(jnp.uint8) if value.dtype == bool else value
    bits = jax.lax.bitcast_convert_type(whole, kind).astype(jnp.uint32)
    # A random factor for each position, so that exchanged elements change the sum.
    factors = (jnp.arange(bits.size, dtype=jnp.uint32) + 1) * jnp.uint32(0x9E3779B1)
    factors = (factors ^ (factors >> 15)) * jnp.uint32(0x85EBCA77) | 1
    return jnp.sum(bits * factors.reshape(bits.shape), dtype=jnp.uint32)


def _shapes(batch: Any) -> tuple[Any, ...]:
    return tuple([np.shape(leaf) for leaf in jax.tree.leaves(batch)])


def pieces(variable: Any) -> list[HeldPiece]:
    """Returns what this process's devices hold of a divided variable; nothing of another.

    Nothing either of one that a LayoutMap divides along two axes, or over each worker's devices.
    """
    array = keras_compat.stored_value(variable)
    if not is_divided(array):
        return []
    part = array.sharding.shard_shape(array.shape)
    axes = [axis for axis, size in enumerate(array.shape) if part[axis] < size]
    if len(axes) > 1 or part[axes[0]] * array.sharding.num_devices != array.shape[axes[0]]:
        return []
    return [_piece(variable, shard, axes[0]) for shard in array.addressable_shards]


def _piece(variable: Any, shard: Any, axis: int) -> HeldPiece:
    shape = tuple(variable.shape)
    begin, end, _ = shard.index[axis].indices(shape[axis])

    def write(values: np.ndarray[Any, Any]) -> None:
        array = keras_compat.stored_value(variable)
        new = jax.device_put(values.reshape(shard.data.shape), shard.device)
        parts = [
            new if one.device == shard.device else one.data for one in array.addressable_shards
        ]
        keras_compat.store_value(variable, _assembled(shape, array.sharding, parts))

    region = Region.along(shape, axis, begin, end)
    return HeldPiece(region, shard.data.dtype.name, lambda: np.asarray(shard.data), write)


def is_divided(array: Any) -> bool:
    """Returns whether each worker holds a part of an array."""
    return not array.is_fully_addressable and not array.is_fully_replicated
