"""Decides how devices form a mesh, and which part of an array each device holds.

This file also decides which axis of a variable is sharded (`sharding=`), and records to which
weight a variable of an optimizer belongs.
"""

from __future__ import annotations

import contextlib
import inspect
import operator
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache, partial
from typing import Any, final

import jax
import keras
import numpy as np
from jax import numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kerasdist import keras_compat
from kerasdist.backends.base.layout_maps import MapReader, key_of, other_devices
from kerasdist.backends.base.variable_rules import is_on_read
from kerasdist.backends.jax.internals import CREATE_DEVICE_MESH
from kerasdist.backends.jax.mesh.arrays import HOST
from kerasdist.core.context import current, replaced
from kerasdist.core.ownership import VariableTable, is_slot, record_slot, weight_of
from kerasdist.core.partitions import Splits, check_partition, mesh_axes, prime_factors
from kerasdist.core.sharding import Sharding, is_small
from kerasdist.core.user_warnings import warn_user

AXIS = "replica"
_IN_HOST = "replica_in_host"
# A warning is given if less than this fraction of the bytes of large variables can be sharded.
_MUCH = 0.9
WHOLE = PartitionSpec()

# For each weight: the axis that the layout map of the model's class shards over the mesh axis
# "batch", and a text that names the map's entry. Both are stored when the weight is made. Maps of
# other models' classes that come later so have no effect on this weight.
_own_axes: VariableTable[tuple[int | None, str]] = VariableTable()


@final
class _Thread(threading.local):
    """The state of one thread while it makes an optimizer's variable, or traces a step.

    Attributes:
        weight: The weight for which the variable is made.
        layout: The layout of the step that the thread traces.
    """

    weight: Any = None
    layout: Layout | None = None


_thread = _Thread()


@cache
def _note_slots() -> None:
    """Makes optimizers record to which weight each of their variables belongs, from now on."""
    keras_compat.install(slot=_make_slot, slot_made=_note_new)


def _make_slot(
    original: Callable[..., Any],
    optimizer: keras.Optimizer,
    reference_variable: keras.Variable,  # some optimizers pass this argument by its name
    *args: object,
    **kwargs: object,
) -> Any:
    """Makes an optimizer's variable for a weight, and tells `_note_new` which weight it is."""
    with replaced(_thread, "weight", reference_variable):
        return original(optimizer, reference_variable, *args, **kwargs)


def _note_new(
    original: Callable[..., Any], variable: keras.Variable, *args: object, **kwargs: object
) -> None:
    """Makes a variable; if it is an optimizer's, first records the weight that it belongs to."""
    if keras_compat.is_of_optimizer():
        record_slot(variable, _thread.weight)
    original(variable, *args, **kwargs)


def note_all(optimizer: keras.Optimizer, weights: Iterable[keras.Variable]) -> None:
    """Records to which weights an optimizer's variables belong, if that is not recorded yet.

    An optimizer may have been built before recording began. The first layout that shards variables
    starts the recording (`_note_slots`).
    """
    unknown = [one for one in optimizer.variables if not is_slot(one)]
    if unknown:
        owners = keras_compat.referenced_variables(optimizer, weights)
        for variable, weight in zip(optimizer.variables, owners, strict=True):
            if not is_slot(variable):
                record_slot(variable, weight)


@final
class OverReplicas:
    """The rule of `Sharding`: optimizer variables, and perhaps weights, are sharded over replicas.

    Attributes:
        gathers_weights: Whether weights are sharded too, so that steps must gather them.
        own_maps: The layout maps that models' classes define, by the class's name; only for
            ``sharding="auto"``.
    """

    def __init__(self, sharding: Sharding, replicas: int, axis: str) -> None:
        """Stores the number of replicas and the mesh axis over which variables are sharded."""
        self.gathers_weights = sharding.divides_weights
        self.own_maps: dict[str, keras.distribution.LayoutMap] = {}
        self._sharding = sharding
        self._replicas = replicas
        self._axis = axis
        self._has_warned = False

    def spec(self, variable: keras.Variable) -> PartitionSpec:
        """Returns a spec that has, for each axis of a variable, the mesh axis that shards it."""
        return self.update_spec(variable) if self._is_meant(variable) else WHOLE

    def _is_meant(self, variable: keras.Variable) -> bool:
        # Sync-on-read variables are not sharded, because each replica has its own value of them.
        # Unsigned integers are not sharded, because they are bytes or states of random generators;
        # only in quantized kernels (GPTQ) are they weights.
        dtype = keras_compat.stored_dtype(variable)
        is_unsigned = dtype.startswith("uint") and not variable.name.startswith("kernel")
        is_state = self.gathers_weights or is_slot(variable)
        return is_state and not (is_on_read(variable) or is_unsigned)

    def add_map_of(self, kind: type) -> None:
        """Stores the layout map of a model's class, if it has one, for weights made from now on."""
        method = inspect.getattr_static(kind, "get_layout_map", None)
        is_asked = self._sharding.state == "auto" and kind.__name__ not in self.own_maps
        if is_asked and isinstance(method, staticmethod | classmethod):
            devices = [f"replica:{index}" for index in range(self._replicas)]
            mesh = keras.distribution.DeviceMesh((self._replicas, 1), ("batch", "model"), devices)
            self.own_maps[kind.__name__] = kind.get_layout_map(mesh)

    def _own_axis(self, variable: keras.Variable) -> tuple[int | None, str]:
        weight = weight_of(variable)
        if self._sharding.state != "auto" or tuple(weight.shape) != tuple(variable.shape):
            return None, ""
        known = _own_axes.get(weight)
        if known is None:
            known = None, ""
            for name, own in self.own_maps.items():
                layout = own[weight.path]
                if layout is not None and "batch" in layout.axes:
                    known = layout.axes.index("batch"), f"{key_of(layout, own)} of {name}"
            _own_axes.put(weight, known)
        return known

    def why(self, variable: keras.Variable) -> str:
        """Returns, for the user, why `spec` shards a variable in this way, or keeps it whole."""
        shape = tuple(variable.shape)
        if not self.gathers_weights and not is_slot(variable):
            return "not the optimizer's"
        if not self._is_meant(variable):
            return "bytes, or a value of each replica's own"
        if self._sharding.is_small(shape):
            return self._sharding.small
        wanted, own = self._own_axis(variable)
        axis = self._sharding.axis(shape, self._replicas, wanted)
        if axis is None:
            return f"{self._replicas} divides no dimension"
        return own if axis == wanted else f"largest dimension that {self._replicas} divides"

    def require_useful(self, variables: Iterable[keras.Variable]) -> None:
        """Warns once if less than `_MUCH` of the bytes of large variables can be sharded."""
        large = [
            (keras_compat.nbytes(one), one)
            for one in variables
            if self._is_meant(one) and one.shape and not self._sharding.is_small(one.shape)
        ]
        whole = [(size, one) for size, one in large if self.update_spec(one) == WHOLE]
        share = 1 - sum(size for size, _ in whole) / max(sum(size for size, _ in large), 1)
        if self._has_warned or share >= _MUCH:
            return
        self._has_warned = True
        _, first = max(whole, key=operator.itemgetter(0))
        fits = [n for n in range(1, self._replicas) if any(one % n == 0 for one in first.shape)]
        warn_user(
            f"Expected sharding={self._sharding.state!r} to divide most of a model. Received: "
            f"{self._replicas} replicas, which divide {share:.0%} of the bytes of large "
            f"variables; the others, such as {first.path!r} of shape {tuple(first.shape)}, have no "
            "dimension that this number divides, and are whole on each replica. Choose a number "
            f"that divides a dimension (here {fits[-1]}), or make a dimension its multiple."
        )

    def update_spec(self, weight: keras.Variable) -> PartitionSpec:
        """Returns the spec by which a weight's update and its optimizer variables are sharded."""
        wanted, _ = self._own_axis(weight)
        axis = self._sharding.axis(tuple(weight.shape), self._replicas, wanted)
        return WHOLE if axis is None else PartitionSpec(*[None] * axis, self._axis)


@final
class ByLayoutMap:
    """The rule of a ``keras.distribution.LayoutMap``, which shards variables by their paths."""

    gathers_weights = False

    def __init__(self, layout_map: Any, names: Mapping[str, str]) -> None:
        """Stores the map, and for each axis of the map's mesh its name in the strategy's mesh."""
        self._reader = MapReader(layout_map)
        self._names: Mapping[str | None, str] = {**names}

    def require_useful(self, variables: Iterable[keras.Variable]) -> None:
        """Raises a ValueError if a key of the map fits no existing variable or layer's output."""
        self._reader.require_useful()

    def output_spec(self, path: str) -> PartitionSpec | None:
        """Returns the map's spec for a layer's output; None if the map has none.

        Also returns None if the same key of the map matches variables, too.
        """
        axes = self._reader.output_axes(path)
        return None if axes is None else PartitionSpec(*map(self._names.get, axes))

    def spec(self, variable: keras.Variable) -> PartitionSpec:
        """Returns the map's spec for a variable; an optimizer variable has its weight's spec."""
        axes = self._reader.axes(weight_of(variable), tuple(variable.shape))
        if axes is None:
            return WHOLE
        # `axes` leaves out the mesh's axes of size 1. JAX also leaves them out in the specs that it
        # returns, and those specs must be equal to this one.
        return PartitionSpec(*map(self._names.get, axes))

    def update_spec(self, weight: keras.Variable) -> PartitionSpec:
        """Returns the map's spec for the weight, which also holds for the weight's update."""
        return self.spec(weight)

    def why(self, variable: keras.Variable) -> str:
        """Returns, for the user, why `spec` shards a variable in this way, or keeps it whole."""
        return self._reader.why(weight_of(variable), tuple(variable.shape))


@final
class _OfOutputs:
    """A context in which Keras's layers get the layouts of their outputs from a LayoutMap."""

    def __init__(self, rule: ByLayoutMap, mesh: Mesh) -> None:
        self._rule = rule
        self._mesh = mesh
        self._before: list[Any] = []
        keras_compat.install(lay_out_output=_lay_out_output)

    def __enter__(self) -> None:
        self._before.append(keras.distribution.distribution())
        keras.distribution.set_distribution(self)

    def __exit__(self, kind: type | None, *error: object) -> None:
        keras.distribution.set_distribution(self._before.pop())
        if kind is None:
            self._rule.require_useful(())

    def get_variable_layout(self, variable: object) -> None:
        """Returns None, because the strategy, not Keras, decides the layout of variables."""

    def get_tensor_layout(self, path: str) -> NamedSharding | None:
        """Returns how a layer's output is laid out; Keras passes the path ``LAYER/output``."""
        spec = self._rule.output_spec(path)
        if spec is None:
            return None
        keras_compat.internals.LAY_OUT_OUTPUT.require()
        return NamedSharding(self._mesh, spec)


def _lay_out_output(original: Callable[..., Any], outputs: Any, layout: object) -> Any:
    """Lays out a layer's output by Keras's function; keeps the mask, which Keras would lose."""
    laid_out = original(outputs, layout)
    if isinstance(keras.distribution.distribution(), _OfOutputs):
        keras.tree.map_structure(keras_compat.keep_keras_mask, outputs, laid_out)
    return laid_out


@final
class Layout:
    """A mesh with an axis of replicas, and more axes if a replica has several logical devices.

    Attributes:
        mesh: The JAX mesh of all devices.
        shard_mesh: The mesh for global arrays. This is `mesh`, or, if each machine holds all state,
            a mesh with one axis over the machines and one over the replicas of a machine.
        by_replica: The axis, or axes, of `shard_mesh` along which the replicas lie.
        replicas: How many replicas there are.
        local: The devices of this process.
        local_replicas: The numbers of this process's replicas.
        spans_workers: Whether the mesh has devices of other processes.
        splits: Which variables are split over the logical devices, and along which axes.
        sharding: The strategy's argument `sharding`.
        offload: Whether the host holds the optimizer's variables.
        rule: Decides which variables `sharding` divides; None if the argument was not given.
        shards_between_steps: Whether variables are in shards, or in the host's memory, while no
            step runs.
        outputs: A context in which layers shard their outputs as a LayoutMap says. Without a map,
            the context does nothing.
        whole: The sharding of an array of which every device holds a full copy.
        rows: The sharding of an array whose first axis is sharded over the replicas.
    """

    def __init__(
        self,
        devices: Sequence[Any],
        logical_devices: int = 1,
        sharding: Any = None,
        hosts: int = 1,
        *,
        offload: bool = False,
    ) -> None:
        """Arranges the devices in a mesh.

        If `hosts` is more than 1, each of that many machines holds all state, sharded over its
        devices.
        """
        of_workers = _are_of_workers(devices)
        self.replicas = len(devices) // logical_devices
        self.sharding = sharding
        self.offload = offload
        self._factors = prime_factors(logical_devices)
        names = [f"logical_{axis}" for axis in range(len(self._factors))]
        self.rule: OverReplicas | ByLayoutMap | None = None
        if isinstance(sharding, Sharding):
            over = AXIS if hosts == 1 else _IN_HOST
            self.rule = OverReplicas(sharding, self.replicas // hosts, over)
        elif sharding is not None:
            devices, self._factors, names, self.rule = _mapped(devices, sharding, of_workers)
        grid = _grid(devices, (self.replicas, *self._factors), keep_order=of_workers)
        devices = list(grid.flat)
        here = [i for i, one in enumerate(devices) if one.process_index == jax.process_index()]
        self.local_replicas = range(here[0] // logical_devices, (here[-1] + 1) // logical_devices)
        self.spans_workers = len(here) < len(devices)
        self.local = tuple(devices[i] for i in here)
        self.splits = Splits(logical_devices)
        self._logical = tuple(names)
        self.mesh = Mesh(grid, (AXIS, *self._logical))
        self.shards_between_steps = self.rule is not None or offload
        if self.shards_between_steps or logical_devices > 1:
            _note_slots()
        self.shard_mesh = self.mesh
        self.by_replica: str | tuple[str, ...] = AXIS
        if hosts > 1:
            self.by_replica = ("host", _IN_HOST)
            self.shard_mesh = Mesh(grid.reshape(hosts, -1), self.by_replica)
        self.outputs: AbstractContextManager[None] = contextlib.nullcontext()
        if isinstance(self.rule, ByLayoutMap):
            self.outputs = _OfOutputs(self.rule, self.mesh)
        self.whole = NamedSharding(self.shard_mesh, PartitionSpec())
        self.rows = NamedSharding(self.shard_mesh, PartitionSpec(self.by_replica))

    def entry(self, leaves: Sequence[Any]) -> NamedSharding:
        """Returns the sharding with which a batch enters a step.

        This is `rows` if the replicas can divide each array evenly, else `whole`.
        """
        shapes = map(np.shape, leaves)
        is_even = all(shape and shape[0] % self.replicas == 0 for shape in shapes)
        return self.rows if is_even else self.whole

    def of_variables(self, variables: Sequence[keras.Variable]) -> list[NamedSharding]:
        """Returns the sharding of each variable's value, and `whole` for each None in the list."""
        if not self.shards_state:
            return [self.whole] * len(variables)
        return [self.whole if one is None else self.of_variable(one) for one in variables]

    def of_variable(self, variable: keras.Variable) -> NamedSharding:
        """Returns the sharding of a variable's value."""
        if self.rule is not None:
            spec = self.rule.spec(variable)
        else:
            owner = weight_of(variable)
            shards = self.splits.shards_of(owner.path, variable.shape)
            spec = self._spec(shards, uncut=None)
        kind = HOST if self.offloads(variable) else None
        return NamedSharding(self.shard_mesh, spec, memory_kind=kind)

    def offloads(self, variable: keras.Variable) -> bool:
        """Returns whether the host's memory holds a variable.

        With `offload`, the host holds an optimizer's large variables that belong to weights.
        """
        is_of_weight = self.offload and weight_of(variable) is not variable
        return is_of_weight and not is_small(self.sharding, variable.shape)

    def adopt(self, other: Layout) -> None:
        """Adds another layout's rules: which variables are split, and models' layout maps."""
        self.splits.add(other.splits.rules)
        if isinstance(self.rule, OverReplicas) and isinstance(other.rule, OverReplicas):
            self.rule.own_maps |= other.rule.own_maps

    def of_update(self, weight: keras.Variable) -> NamedSharding:
        """Returns how the update of a weight is sharded over the devices."""
        spec = WHOLE if self.rule is None else self.rule.update_spec(weight)
        return NamedSharding(self.shard_mesh, spec)

    @property
    def shards_state(self) -> bool:
        """Whether a device may hold only a shard of a variable, or (with `offload`) none of it."""
        return self.shards_between_steps or bool(self.splits.rules)

    def assign(self, tensor: jax.Array, device: int) -> jax.Array:
        """Replicates a step's tensor on all logical devices of a replica, not only on `device`."""
        if not 0 <= device < self.splits.logical_devices:
            raise ValueError(
                "Expected logical_device_id to be one of the "
                f"{self.splits.logical_devices} logical devices of a replica, from 0. "
                f"Received: logical_device_id={device!r}."
            )
        return self.replicate(tensor)

    def split(self, tensor: jax.Array, shards: Sequence[int]) -> jax.Array:
        """Shards a step's tensor over the logical devices of a replica."""
        check_partition(tensor.shape, shards, self.splits.logical_devices)
        return self._constrained(tensor, self._spec(shards, uncut=PartitionSpec.UNCONSTRAINED))

    def replicate(self, tensor: jax.Array) -> jax.Array:
        """Replicates a step's tensor on all logical devices of a replica."""
        rank = len(tensor.shape)
        # Axis 0, along which the examples lie, stays unconstrained.
        spec = PartitionSpec(*[PartitionSpec.UNCONSTRAINED] * min(rank, 1), *[None] * (rank - 1))
        return self._constrained(tensor, spec)

    def _spec(self, shards: Sequence[int], uncut: Any) -> PartitionSpec:
        axes = mesh_axes(shards, self._factors)
        return PartitionSpec(*(tuple(self._logical[i] for i in own) or uncut for own in axes))

    def _constrained(self, tensor: jax.Array, spec: PartitionSpec) -> jax.Array:
        return jax.lax.with_sharding_constraint(tensor, NamedSharding(self.mesh, spec))


in_step = partial(replaced, _thread, "layout")
"""Returns a context in which `layout_of_step` returns the given layout."""


def layout_of_step() -> Layout | None:
    """Returns the layout of the step of `fit` that this thread traces; None in `Strategy.run`."""
    replica = current.replica
    in_run = replica is not None and replica.num_replicas_in_sync > 1
    return None if in_run else _thread.layout


def _mapped(
    devices: Sequence[Any], layout_map: Any, of_workers: bool
) -> tuple[list[Any], tuple[int, ...], list[str], ByLayoutMap]:
    """Reads a LayoutMap, which determines how the devices form the mesh.

    Returns the order of the devices, the sizes of the mesh axes within a replica, the names of
    these axes, and the rule by which variables are sharded.
    """
    mesh = layout_map.device_mesh
    wanted = [str(name) for name in np.ravel(mesh.devices)]
    if of_workers:
        known = {f"{one.platform}:{number}": one for number, one in enumerate(devices)}
        # The order must be equal, too, because one process has all devices of a replica.
        fits = wanted == list(known)
    else:
        known = {f"{one.platform}:{one.id}": one for one in devices}
        fits = sorted(wanted) == sorted(known)
    if not fits:
        raise other_devices(wanted, list(known))
    data, *others = mesh.axis_names
    # Axes get new names, because the user may have named one `replica`, like the strategy's axis.
    names = [f"logical_{one}" for one in others]
    rule = ByLayoutMap(layout_map, dict(zip([data, *others], [AXIS, *names], strict=True)))
    return [known[name] for name in wanted], tuple(mesh.shape[1:]), names, rule


def _grid(devices: Sequence[Any], shape: tuple[int, ...], *, keep_order: bool = False) -> Any:
    """Arranges devices in a grid of this shape, so that a replica's logical devices are neighbours.

    `keep_order` is for several workers, each of which has all devices of its replicas.
    """
    is_torus = len(shape) > 1 and devices[0].platform == "tpu" and not keep_order
    if is_torus and CREATE_DEVICE_MESH.is_there():
        # The chips of a TPU slice are connected as a torus, but not numbered along the torus.
        # `jax.make_mesh` does not suffice, because it can split an axis of the torus only on some
        # kinds of TPU.
        create_device_mesh = CREATE_DEVICE_MESH.value
        # These errors mean that the devices are not a block of a torus.
        with contextlib.suppress(NotImplementedError, AssertionError):
            return create_device_mesh(shape, devices, allow_split_physical_axes=True)
    return np.array(devices).reshape(shape)


def _are_of_workers(devices: Sequence[Any]) -> bool:
    """Returns whether the devices belong to several running processes.

    This is False for the devices for which `kerasdist plan` compiles, because no process runs on
    them.
    """
    return jax.process_count() > 1 and len({one.process_index for one in devices}) > 1


def only_first(tensor: jax.Array) -> jax.Array:
    """Returns this replica's term of a sum over the replicas that equals replica 0's tensor.

    This is `tensor` on replica 0, and zeros on the other replicas. Booleans become int8.
    """
    number = tensor.astype("int8") if tensor.dtype == bool else tensor
    return jnp.where(is_first(), number, jnp.zeros_like(number))


def is_first() -> jax.Array:
    """Returns whether this device belongs to replica 0, as a traced boolean."""
    return jax.lax.axis_index(AXIS) == 0
