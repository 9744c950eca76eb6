"""Sharded state (`sharding=`): how it is made, read, written and used in a step.

Code outside of compiled programs reads full values, so each read of a sharded variable gathers its
shards. Therefore all workers must make, read and write such a variable together. If one worker read
or wrote such a variable alone, its collective would wait for workers that run another program.

A step of `fit` takes each device's shards. A weight that is sharded over the replicas is gathered
for each use (`gathers.py`), and the optimizer updates shards.
"""

from __future__ import annotations

import ctypes
import json
import sys
import weakref
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, final

import jax
import keras
import numpy as np
from jax.sharding import NamedSharding

from kerasdist import keras_compat
from kerasdist.agreement.results import checksum_in_type, unnumbered
from kerasdist.backends.base import weight_files
from kerasdist.backends.base.checks import meeting_at
from kerasdist.backends.jax.mesh import host_memory
from kerasdist.backends.jax.mesh.arrays import (
    HOST,
    in_device_memory,
    is_placed,
    is_traced,
    on_device,
    parts_of,
)
from kerasdist.backends.jax.mesh.gathers import gather
from kerasdist.backends.jax.mesh.host_memory import constrained
from kerasdist.backends.jax.mesh.layout import in_step, layout_of_step
from kerasdist.backends.jax.mesh.worker_placement import checksums_of
from kerasdist.core import context, ownership

if TYPE_CHECKING:
    from kerasdist.backends.jax.mesh.placement import Placement

# The placements of strategies that keep state sharded, or in the host's memory, between steps.
_placements: weakref.WeakSet[Placement] = weakref.WeakSet()

# Whenever variables have got this many bytes of new values, libc is asked to return free memory.
_KEPT = 1 << 25


def add(place: Placement) -> None:
    """Registers the placement of a strategy that shards variables, or keeps them on the host."""
    keras_compat.internals.INITIALIZE.require()
    _placements.add(place)
    install()


@cache
def install() -> None:
    """Hooks into how Keras makes, reads, writes and updates variables; once per process."""
    weight_files.install()
    keras_compat.install(
        variable_sharded=_shard_new,
        initialize=_initialize,
        store=_store,
        read_whole=_read,
        show=_show,
        stateless_apply=_apply,
    )


def _place_of(variable: keras.Variable) -> Placement | None:
    """Returns the placement of a variable that is sharded, or in the host's memory; else None."""
    weight = ownership.weight_of(variable)
    strategy = (
        ownership.strategy_of(variable)
        or ownership.strategy_of(weight)
        or context.scoped_strategy()
    )
    place: Placement | None = getattr(getattr(strategy, "replica_set", None), "arrays", None)
    if place is None or not place.layout.shards_between_steps:
        return None
    return None if place.layout.of_variable(variable) == place.whole else place


# The following functions run between the steps, outside of compiled programs.


def _initialize(original: Callable[..., Any], variable: keras.Variable, initializer: Any) -> None:
    """Gives a new variable its initial value, of which each device holds a shard.

    With an initializer of Keras, each device draws its own shard, so no device holds the full
    value.
    """
    place = _place_of(variable)
    if place is None:
        original(variable, initializer)
        return
    shape, dtype = tuple(variable.shape), keras_compat.stored_dtype(variable)
    sharding = place.layout.of_variable(variable)
    kind, seed = _kind_of(initializer)
    if seed is not None and place.job is not None:
        made = f"{unnumbered(variable.path)} {shape} {dtype}"
        with place.job.translating_failures(f"initial value of {made}"):
            place.job.assert_equal("sharded variables", {"new variable": made})
            kind, seed = place.job.broadcast_object("initial value", (kind, seed))
    if kind:
        program = _program_of(kind, shape, dtype, sharding)
        # Keras itself makes the same key from an integer seed.
        key = keras_compat.ops.convert_to_tensor([seed or 0, 0], dtype="uint32")
        # Programs run one at a time, to limit the memory for temporary values.
        keras_compat.store_value(variable, jax.block_until_ready(program(np.asarray(key))))
        give_back(variable)
        return
    # Any other initializer draws the whole value. It runs on the host, because the value may be too
    # large for a device.
    with jax.default_device(place.host):
        value = keras_compat.ops.convert_to_tensor(initializer(shape, dtype=dtype), dtype)
    keras_compat.store_value(variable, value)
    with meeting_at(variable, "initial value", place.job):
        place.equalize([variable])
    keras_compat.store_value(variable, place.put(keras_compat.stored_value(variable), sharding))


def _kind_of(initializer: Any) -> tuple[str, int | None]:
    """Returns the configuration of an initializer of Keras, as JSON without the seed, and the seed.

    The seed is None for an initializer that draws nothing. Returns "" and 0 for an initializer that
    is not Keras's own, or whose configuration JSON cannot express.
    """
    seed = getattr(initializer, "seed", None)
    if not isinstance(seed, int | None) or not keras_compat.is_builtin(type(initializer)):
        return "", 0
    config = {"class_name": type(initializer).__name__, "config": initializer.get_config()}
    # `_program_of` replaces this 0 by the seed. If a user gave no seed, the configuration has None.
    # From None Keras would draw a new random seed, which would change later random draws.
    if seed is not None:
        config["config"]["seed"] = 0
    try:
        return json.dumps(config), seed
    except TypeError:  # for example, the configuration has a tensor in place of a number
        return "", 0


@lru_cache(64)
def _program_of(
    kind: str, shape: tuple[int, ...], dtype: str, sharding: NamedSharding
) -> Callable[..., jax.Array]:
    """Returns a program that draws an initial value from a seed.

    The seed is an argument, so variables that differ only in the seed share a program.
    """
    initializer: Any = keras.initializers.get(json.loads(kind))

    def drawn(seed: jax.Array) -> Any:
        initializer.seed = seed
        return keras_compat.ops.convert_to_tensor(initializer(shape, dtype=dtype), dtype)

    return jax.jit(drawn, out_shardings=sharding)


def _shard_new(
    original: Callable[..., None], variable: keras.Variable, *args: object, **kwargs: object
) -> None:
    """Shards the value of a new variable that was made from a value, not from an initializer."""
    original(variable, *args, **kwargs)
    value = keras_compat.stored_value(variable)
    if value is None or keras_compat.get_stateless_scope() is not None:
        return
    _store(keras_compat.store_value, variable, value)


def _store(original: Callable[..., Any], variable: keras.Variable, value: Any) -> Any:
    """Assigns a value to a variable. Outside of compiled programs, shards the value at once.

    So even if many variables are assigned, only one full value exists at a time.
    """
    if weight_files.is_compared(variable, value):
        return value
    in_scope = keras_compat.get_stateless_scope() is not None
    place = None if in_scope or is_traced(value) else _place_of(variable)
    if place is None:
        return original(variable, value)
    sharding, dtype = place.layout.of_variable(variable), variable.dtype
    # A NumPy array usually comes from a file. Its shards go directly to the devices, without a full
    # copy of the array.
    on_host = isinstance(value, np.ndarray)
    if not on_host:
        value = keras_compat.ops.convert_to_tensor(value, dtype=dtype)
    if is_placed(value, sharding) or tuple(value.shape) != tuple(variable.shape):
        return original(variable, value)  # Keras itself refuses a value of another shape

    def checksum() -> int:
        if isinstance(value, np.ndarray):
            return checksum_in_type(value, dtype)
        return checksums_of([value])[0]

    # A variable that is not sharded, but only kept in host memory, is assigned without waiting for
    # the other workers.
    job = None if sharding.is_fully_replicated else place.job
    with meeting_at(variable, "assignment", job, checksum):
        if not on_host:
            return original(variable, place.put(value, sharding))
        keras_compat.store_value(variable, None)  # frees old shards before devices get new ones
        result = original(variable, parts_of(value, dtype, sharding))
    give_back(variable)
    return result


@final
class _Freed:
    """Counts the bytes that were stored in variables since libc last returned free memory."""

    since = 0


def give_back(variable: keras.Variable) -> None:
    """Makes libc return free memory to the system, once per `_KEPT` bytes of new values.

    Freed arrays below 32 MiB leave gaps in libc's heaps. Many of the gaps are in heaps of JAX's
    threads, where other threads cannot use them. Without this function, a worker that had loaded a
    preset used twice the memory of its shards.
    """
    _Freed.since += keras_compat.nbytes(variable)
    if _Freed.since < _KEPT:
        return
    _Freed.since = 0
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:  # only glibc has this function
        trim(0)


def _show(original: Callable[[Any], str], variable: keras.Variable) -> str:
    try:
        return original(variable)
    except RuntimeError:
        # Other workers hold some of the shards, so the value cannot be shown. Keras 3.13 and later
        # show no value in this case, either.
        shape, dtype = tuple(variable.shape), variable.dtype
        return f"<Variable path={variable.path}, shape={shape}, dtype={dtype}>"


def _read(original: Callable[[Any], Any], variable: keras.Variable) -> Any:
    """Reads a variable. Outside of compiled programs, gathers its shards at once.

    While a step is traced, adds the gathering of the variable's shards to the program instead.
    """
    value = original(variable)
    if is_traced(value):
        return _gathered_in_step(variable, host_memory.brought(variable, value))
    layout = layout_of_step()
    in_step = layout is not None and layout.shards_state
    in_program = keras_compat.get_stateless_scope() is not None or in_step
    return value if in_program else whole(variable, value)


def whole(variable: keras.Variable, value: object) -> Any:
    """Returns a variable's value as a full array. All workers must call this function."""
    if not isinstance(value, jax.Array) or value.is_fully_replicated:
        return on_device(value)
    # The value's mesh shows which placement has sharded it. The variable itself may not belong to a
    # strategy, because a step may also have sharded a weight that was made outside of the
    # strategy's scope, such as a weight of a LoRA adapter.
    mesh = getattr(value.sharding, "mesh", None)
    place = next((one for one in [*_placements] if one.layout.shard_mesh == mesh), None)
    if place is None:
        return value
    with meeting_at(variable, "read", place.job):
        return place.read(value)


# The following functions run inside of a step.


def _gathered_in_step(variable: keras.Variable, value: jax.Array) -> jax.Array:
    layout = layout_of_step()
    if layout is None or not layout.shards_state:
        return value
    at_rest = layout.of_variable(variable)
    if at_rest.memory_kind == HOST:
        return jax.device_put(value, in_device_memory(at_rest))
    if layout.rule is None or not layout.rule.gathers_weights or at_rest == layout.whole:
        return value
    return gather(value, at_rest, layout.whole)


def _apply(
    original: Callable[..., Any],
    optimizer: keras.Optimizer,
    optimizer_variables: Sequence[Any],
    grads: Sequence[Any],
    trainable_variables: Sequence[Any],
) -> Any:
    """Updates weights so that each device computes only its own shard of the update."""
    layout = layout_of_step()
    if layout is None or not layout.shards_between_steps:
        return original(optimizer, optimizer_variables, grads, trainable_variables)
    weights = keras_compat.optimized_variables(optimizer)
    parts = [layout.of_update(weight) for weight in weights]
    grads, values = (
        [constrained(value, part) for value, part in zip(given, parts, strict=True)]
        for given in (grads, trainable_variables)
    )
    kept = layout.of_variables(optimizer.variables)
    with (
        host_memory.read_in_order(optimizer, optimizer_variables, kept) as state,
        in_step(None),  # without a layout, the optimizer's reads gather nothing
    ):
        new, own = original(optimizer, state, grads, values)
    own = list(map(constrained, own, kept))
    at_rest = layout.of_variables(weights)
    new = [
        constrained(constrained(value, part), rest)
        for value, part, rest in zip(new, parts, at_rest, strict=True)
    ]
    return new, own
