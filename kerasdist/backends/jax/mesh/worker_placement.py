"""Places the arrays of a step on a mesh that spans the devices of several workers."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, final

import jax
import keras
import numpy as np
from jax import numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from kerasdist import keras_compat
from kerasdist.agreement import results
from kerasdist.backends.jax.mesh.arrays import (
    HOST,
    in_bundles,
    is_placed,
    is_sharded,
    local_copy,
    on_device,
)
from kerasdist.backends.jax.mesh.layout import Layout
from kerasdist.backends.jax.mesh.placement import Placement
from kerasdist.core.sharding import HeldShard, Region
from kerasdist.job.job import Job

# The most bytes of variables that are copied to the host at a time, unless one variable is larger.
_BUNDLE = 1 << 26

# The most bytes that a device gets at a time when workers exchange data from host to host.
_CHUNK = 1 << 26


@partial(jax.tree_util.register_dataclass, data_fields=["array"], meta_fields=["count"])
@dataclass(frozen=True)
class _Rows:
    """An output of `predict`, with padding rows at the end so that the replicas can divide it.

    Attributes:
        array: The rows and the padding.
        count: The number of rows without the padding.
    """

    array: jax.Array
    count: int


@final
class WorkerPlacement(Placement):
    """Keeps variables as global arrays, of which each process holds the shards of its devices.

    All processes must take part when one of them computes with a global array. But between programs
    a process may work alone, for example to save a model. So code that reads a variable gets an
    array of its own process only, which shares the memory of the global array
    (`arrays.local_copy`). All workers must read a sharded variable together (`read`).

    Each worker has the same batch, and contributes the rows of its own replicas.
    """

    def __init__(
        self,
        layout: Layout,
        job: Job,
        begin_step: Callable[[], None],
        note_batch: Callable[[Hashable], None],
    ) -> None:
        """Makes the placement.

        Args:
            layout: The mesh, and the shardings of arrays on it.
            job: The job of this worker.
            begin_step: A function that is called before each program.
            note_batch: A function that is called with the shapes of each batch.
        """
        super().__init__(layout, begin_step)
        self.job = self._job = job
        self._note_shapes = note_batch
        firsts: dict[int, Any] = {}  # the first device of each worker, by rank
        for device in layout.mesh.devices.flat:
            firsts.setdefault(device.process_index, device)
        mesh = Mesh(np.array(list(firsts.values())), ("worker",))
        self._of_workers = NamedSharding(mesh, PartitionSpec("worker"))
        self._own_first = firsts[jax.process_index()]
        self.places_ahead = True

    def put(self, array: Any, sharding: Sharding) -> jax.Array:
        """Makes a global array from a full array; each worker contributes its devices' shards."""
        if is_placed(array, sharding):
            return array
        if isinstance(array, jax.Array) and is_sharded(array):
            return self._resharded(array, sharding)
        rows = self.copy_if_shared(local_copy(array))
        if sharding.memory_kind == HOST:  # an array in device memory must move to the host
            rows = np.asarray(rows)
        made = jax.make_array_from_callback(
            np.shape(rows),
            sharding,
            lambda index: rows if sharding.is_fully_replicated else rows[index],
        )
        return made if isinstance(rows, jax.Array) else self.wait_until_sent(made)

    def read(self, array: jax.Array) -> jax.Array:
        """Returns an array's full value. If it is sharded, all workers must call this method."""
        return local_copy(self._resharded(array, self.whole) if is_sharded(array) else array)

    def _resharded(self, array: jax.Array, sharding: Sharding) -> jax.Array:
        self.record("that shards again", array.dtype, array.shape)
        return _sharded_as(sharding)(array)

    def _collected(self, rows: _Rows) -> np.ndarray[Any, Any]:
        # `np.asarray` would also wait for the array, but a Ctrl-C during that wait would be lost.
        array = jax.block_until_ready(rows.array)
        shards = {shard.index[0].start or 0: shard.data for shard in array.addressable_shards}
        here = [np.asarray(shards[begin]) for begin in sorted(shards)]
        return self.rows_of_all(np.concatenate(here))[: rows.count]

    def equalize(self, variables: Sequence[keras.Variable]) -> None:
        """Gives variables exactly the chief's values. All workers must call this method."""
        sizes = [keras_compat.stored_value(one).nbytes for one in variables]
        for bundle in in_bundles(variables, sizes, _BUNDLE):
            arrays = [keras_compat.stored_value(one) for one in bundle]
            values = [np.asarray(array.addressable_data(0)) for array in arrays]
            own = [np.ascontiguousarray(value).reshape(-1).view(np.uint8) for value in values]
            ends = np.cumsum([one.size for one in own])
            # The other workers send zeros, so the sum over all workers has the chief's values.
            data = np.concatenate(own) * np.uint8(self._job.is_chief)
            data = self._exchanged(data, _CHUNK, _summed_over_workers)
            chiefs = np.split(data, ends[:-1])
            for variable, value, mine, new in zip(bundle, values, own, chiefs, strict=True):
                if not np.array_equal(mine, new):
                    with self.variables():
                        array = jnp.array(new.view(value.dtype).reshape(value.shape))
                    keras_compat.store_value(variable, array)

    def rows_of_all(self, rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Returns the rows of all workers, on the host.

        All workers must call this method, with equal numbers of rows.
        """
        gathered = self._exchanged(rows, max(_CHUNK // self._job.num_workers, 1), _sharded_as)
        shape = len(rows) * self._job.num_workers, *rows.shape[1:]
        return gathered.view(rows.dtype).reshape(shape)

    def _exchanged(
        self,
        array: np.ndarray[Any, Any],
        most: int,
        program: Callable[[Sharding], Callable[..., Any]],
    ) -> np.ndarray[Any, Any]:
        """Exchanges an array's bytes with the other workers, at most `most` bytes at a time.

        `program(sharding)` returns the function that exchanges the bytes. That function takes an
        array with one row per worker, and its result has the given sharding.
        """
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        exchange = program(NamedSharding(self._of_workers.mesh, PartitionSpec()))
        results: list[Any] = []
        for chunk in np.split(data, range(most, data.size, most)):
            self.record("that exchanges bytes", chunk.shape)
            own = jax.device_put(chunk[np.newaxis], self._own_first)
            shape = self._job.num_workers, chunk.size
            rows = jax.make_array_from_single_device_arrays(shape, self._of_workers, [own])
            # `np.asarray` would also wait, but a Ctrl-C during that wait would be lost.
            result = jax.block_until_ready(exchange(rows))
            results.append(np.asarray(result.addressable_data(0)))
        return np.concatenate(results, axis=-1)

    def chosen(self, numbers: Any) -> Any:
        """Returns, of all row numbers of a batch, the numbers of the rows that this worker reads.

        Each worker reads all rows if the replicas cannot divide the batch evenly.
        """
        share, rest = divmod(len(numbers), self.layout.replicas)
        here = self.layout.local_replicas
        return numbers if rest else numbers[here.start * share : here.stop * share]

    def chosen_rows(self, batch: Any, total: int) -> Any:
        """Makes a global batch of `total` rows from this worker's rows, which `chosen` selected."""
        if total % self.layout.replicas:
            return jax.tree.map(lambda leaf: self.put(leaf, self.whole), batch)

        return self.wait_until_sent(
            jax.tree.map(partial(jax.make_array_from_process_local_data, self.rows), batch)
        )

    def _note_batch(self, batch: Any) -> None:
        self._note_shapes(_shapes(batch))
        self.record("of operations of an eager step of", _shapes(batch))

    def launch(
        self, program: Any, state: Any, batches: Sequence[Any], seen: dict[Hashable, str]
    ) -> tuple[Any, Any]:
        """Runs a program. Workers compare the first program of each step before it runs."""
        form: Hashable = _shapes(batches[0])
        if len(batches) > 1:
            # Workers must also compare the number of steps, because a worker whose batches differ
            # in shape from each other runs one step at a time.
            form = f"{form}, {len(batches)} steps at once"
        if not seen:
            self._note_shapes(form)
            seen[form] = self.compare(program, state, batches)
        else:
            if form not in seen:
                # This program is not compared before it runs, because a worker whose batch has
                # another shape may run an earlier program, and would not take part in a comparison.
                seen[form] = results.digest_of(program.lower(state, batches).as_text())
            is_compared = form == next(iter(seen))
            self._note_shapes(form if is_compared else f"{form} program {seen[form][:12]}")
        for _ in batches[1:]:
            self._note_shapes(form)
        self.record(seen[form][:12], "of a step of", form)

        def result(leaf: object) -> Any:
            return self._collected(leaf) if isinstance(leaf, _Rows) else local_copy(leaf)

        outputs, new = super().launch(program, state, batches, seen)
        return jax.tree.map(result, outputs, is_leaf=lambda leaf: isinstance(leaf, _Rows)), new

    def returned(self, leaf: Any, *, keeps_rows: bool) -> Any:
        """Constrains an output to be whole on each device, or to be sharded.

        It is sharded if Keras keeps its rows, as in `predict`, and if there are at least as many
        rows as replicas.
        """
        if not isinstance(leaf, jax.Array):
            return leaf
        if not keeps_rows or not leaf.ndim or len(leaf) < self.layout.replicas:
            return jax.lax.with_sharding_constraint(leaf, self.whole)
        missing = [(0, -len(leaf) % self.layout.replicas)] + [(0, 0)] * (leaf.ndim - 1)
        rows = jax.lax.with_sharding_constraint(jnp.pad(leaf, missing), self.rows)
        return _Rows(rows, len(leaf))


@cache
def _sharded_as(sharding: Sharding) -> Callable[..., Any]:
    """Returns a program that changes an array's sharding. All workers must run the program."""
    return jax.jit(lambda array: array, out_shardings=sharding)


@cache
def _summed_over_workers(sharding: Sharding) -> Callable[..., Any]:
    """Returns a program that sums all workers' rows. All workers must run the program."""
    return jax.jit(lambda rows: jnp.sum(rows, 0, dtype=rows.dtype), out_shardings=sharding)


def checksums_of(values: Sequence[jax.Array]) -> list[int]:
    """Returns a checksum of each array's bits in this process; 0 for a sharded array."""
    sums = [
        0 if is_sharded(value) else _sum_of_bits(on_device(value.addressable_data(0)))
        for value in values
    ]
    return [int(one) for one in jax.device_get(sums)]


@jax.jit
def _sum_of_bits(value: jax.Array) -> jax.Array:
    kind = jnp.uint8 if value.dtype.itemsize == 1 else jnp.uint16
    whole = value.astype(jnp.uint8) if value.dtype == bool else value
    bits = jax.lax.bitcast_convert_type(whole, kind).astype(jnp.uint32)
    # Each position has a random factor, so that the sum also changes if two elements are swapped.
    factors = (jnp.arange(bits.size, dtype=jnp.uint32) + 1) * jnp.uint32(0x9E3779B1)
    factors = (factors ^ (factors >> 15)) * jnp.uint32(0x85EBCA77) | 1
    return jnp.sum(bits * factors.reshape(bits.shape), dtype=jnp.uint32)


def _shapes(batch: object) -> tuple[Any, ...]:
    return tuple([np.shape(leaf) for leaf in jax.tree.leaves(batch)])


def shards_of(variable: keras.Variable) -> list[HeldShard]:
    """Returns this process's shards of a variable; an empty list if it is not sharded.

    The list is also empty for a variable that a LayoutMap shards along two axes.
    """
    array = keras_compat.stored_value(variable)
    if not is_sharded(array):
        return []
    part = array.sharding.shard_shape(array.shape)
    axes = [axis for axis, size in enumerate(array.shape) if part[axis] < size]
    if len(axes) > 1:
        return []
    return [_held_shard(variable, shard, axes[0]) for shard in array.addressable_shards]


def _held_shard(variable: keras.Variable, shard: Any, axis: int) -> HeldShard:
    shape = tuple(variable.shape)
    begin, end, _ = shard.index[axis].indices(shape[axis])

    def write(values: np.ndarray[Any, Any]) -> None:
        array = keras_compat.stored_value(variable)
        new = jax.device_put(values.reshape(shard.data.shape), shard.data.sharding)
        parts = [
            new if one.device == shard.device else one.data for one in array.addressable_shards
        ]
        keras_compat.store_value(
            variable, jax.make_array_from_single_device_arrays(shape, array.sharding, parts)
        )

    region = Region.along(shape, axis, begin, end)
    return HeldShard(
        region,
        shard.data.dtype.name,
        lambda: np.asarray(shard.data),
        write,
        is_first=shard.replica_id == 0,
        path=variable.path,
    )
