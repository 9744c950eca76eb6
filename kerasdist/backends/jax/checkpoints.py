"""Orbax's checkpoints: each process writes and reads the shards of its devices."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast, final

import jax
import keras
import numpy as np

from kerasdist import keras_compat
from kerasdist.backends.base.interface import CheckpointFormat, Key, ReplicaSet
from kerasdist.backends.base.variable_rules import is_on_read
from kerasdist.backends.jax.mesh.arrays import in_bundles
from kerasdist.backends.jax.mesh.placement import Placement
from kerasdist.backends.jax.mesh.sharded_state import give_back
from kerasdist.errors import UnsupportedError
from kerasdist.job.job import Job
from kerasdist.keras_compat import ops

# The folders in which the folder of a step has the arrays: the first is that of Keras's
# OrbaxCheckpoint, the second that of Orbax's CheckpointManager.
_INNER = ("pytree", "default")
# How many bytes of a checkpoint are read at a time. If a checkpoint has more than 16 times as many,
# it is read in about 16 parts. Memory must hold a part in addition to the variables' values.
_AT_ONCE = 1 << 26


@final
class OrbaxFormat(CheckpointFormat):
    """Reads and writes checkpoints by Orbax, which is imported when an `OrbaxFormat` is made."""

    marker = "_METADATA"

    def __init__(self) -> None:
        try:
            self._orbax: Any = importlib.import_module("orbax.checkpoint")
        except ImportError as error:
            raise UnsupportedError(
                "Expected the package orbax-checkpoint, which writes and reads checkpoints on JAX. "
                f"Received: {error}. Install it: pip install orbax-checkpoint."
            ) from error

    def folder_in(self, path: Path) -> Path | None:
        """Returns the folder that holds arrays: `path` or a folder in it. None if neither does."""
        places = (path, *(path / one for one in _INNER))
        return next((one for one in places if super(OrbaxFormat, self).folder_in(one)), None)

    def shapes(self, path: str) -> Mapping[Key, tuple[int, ...]]:
        """Returns the shapes of a checkpoint's arrays."""
        with self._checkpointer() as checkpointer:
            description = checkpointer.metadata(path).item_metadata
        if description is None:
            raise ValueError("Orbax finds no arrays there, and has logged why")
        leaves = self._orbax.tree.to_flat_dict(description.tree)
        return {
            key: tuple(leaf.shape)
            for key, leaf in leaves.items()
            if getattr(leaf, "shape", None) is not None
        }

    def save(self, path: str, tree: Mapping[str, Any], replicas: ReplicaSet | None) -> None:
        """Writes variables; each process writes the shards that its devices hold."""
        place = _place_of(replicas)
        arrays = keras.tree.map_structure(lambda one: _array_of(one, place), tree)
        with self._checkpointer(replicas) as checkpointer:
            checkpointer.save(path, arrays)

    def load(
        self, path: str, wanted: Sequence[tuple[Key, keras.Variable]], replicas: ReplicaSet | None
    ) -> None:
        """Gives variables the values of a checkpoint; each process reads its devices' shards."""
        place = _place_of(replicas)
        sizes = [keras_compat.nbytes(variable) for _, variable in wanted]
        # The values are read in at most about 16 bundles, because each bundle costs a new call of
        # Orbax's `restore`.
        for some in in_bundles(wanted, sizes, max(_AT_ONCE, sum(sizes) // 16)):
            flat = dict[Key, Any]()
            for key, variable in some:
                dtype = np.dtype(keras_compat.stored_dtype(variable))
                sharding = _sharding_of(variable, place)
                flat[key] = jax.ShapeDtypeStruct(variable.shape, dtype, sharding=sharding)
            forms = self._orbax.tree.from_flat_dict(flat)
            options = self._orbax.checkpoint_utils.construct_restore_args(forms)
            arguments = self._orbax.args.PyTreeRestore(forms, options, partial_restore=True)
            with self._checkpointer(replicas) as checkpointer:
                found = self._orbax.tree.to_flat_dict(checkpointer.restore(path, args=arguments))
            for key, variable in some:
                value = found[key]
                if is_on_read(variable):
                    variable.assign(np.asarray(value.addressable_data(0)))
                else:
                    [value] = [value] if place is None else place.leave([value])
                    keras_compat.store_value(variable, value)
                give_back(variable)

    def _checkpointer(self, replicas: ReplicaSet | None = None) -> Any:
        handler = self._orbax.PyTreeCheckpointHandler()
        if replicas is not None and replicas.job is not None:
            _fail_together(handler, replicas.job)
        return self._orbax.Checkpointer(handler)


def _fail_together(handler: Any, job: Job) -> None:
    """Makes an Orbax handler's `save` and `restore` fail on all workers if they fail on one.

    Otherwise the other workers would wait for the failed worker. Orbax itself calls `finalize` on
    the chief alone, so the other workers would not notice a failure of `finalize`. Therefore this
    function replaces `save`. At the end of the new `save`, the chief calls `finalize`, and the
    other workers wait until it is done.
    """
    reporting = job.all_do("write, or read, their shards of a checkpoint", OSError)
    write, finish = reporting(handler.save), handler.finalize

    def save(directory: object, *args: object, **options: object) -> None:
        write(directory, *args, **options)
        with job.chief_first():
            if job.is_chief:
                finish(directory)

    handler.save, handler.restore = save, reporting(handler.restore)
    handler.finalize = lambda _: None


def _place_of(replicas: ReplicaSet | None) -> Placement | None:
    return None if replicas is None else cast("Any", replicas).arrays


def _sharding_of(variable: keras.Variable, place: Placement | None) -> Any:
    if place is None:
        return keras_compat.stored_value(variable).sharding
    return place.whole if is_on_read(variable) else place.layout.of_variable(variable)


def _array_of(variable: keras.Variable, place: Placement | None) -> jax.Array:
    """Returns a variable's value as an array for Orbax; in a job this is a global array."""
    if is_on_read(variable):
        value: Any = np.asarray(ops.convert_to_numpy(variable))
    else:
        value = keras_compat.stored_value(variable)
    return (
        jax.numpy.asarray(value)
        if place is None
        else place.put(value, _sharding_of(variable, place))
    )
