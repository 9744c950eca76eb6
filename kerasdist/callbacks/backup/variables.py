"""The variables of a backup: how each worker writes its shards, and reads them back.

If workers divide variables, each worker writes a *part*: a file with its own shards, in the format
of `storage`. The chief's file is written last, and contains the names and digests of all parts. So
a backup is complete as soon as the chief's file exists. A part is not used if no
chief's file contains its name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, partial
from operator import attrgetter
from pathlib import Path
from typing import Any, final

import keras
import numpy as np

from kerasdist import keras_compat
from kerasdist.backends.base.interface import ReplicaSet
from kerasdist.backends.base.model_trainer import replicas_of, trainer_of
from kerasdist.backends.base.variable_rules import is_on_read, is_sum_on_read
from kerasdist.callbacks.backup import storage
from kerasdist.callbacks.backup.encoding import filled
from kerasdist.callbacks.backup.storage import StoredFile, Unread, bytes_of
from kerasdist.callbacks.horovod import broadcast
from kerasdist.core.sharding import HeldShard, Region
from kerasdist.errors import BackupError
from kerasdist.keras_compat import ops

_NAME = re.compile(r"backup-(\d{12})-[0-9a-f]+-part\d+\.kdb")


def write_part(
    path: Path, shards: Mapping[int, Sequence[HeldShard]], mode: int = storage.PRIVATE
) -> list[str]:
    """Writes a worker's part of a backup; returns the part's file name and digest.

    The chief's file stores both.

    Args:
        path: The file.
        shards: The shards that this worker holds, by the number of the variable.
        mode: The file's permissions.
    """
    places, arrays = [], []
    for variable, held in shards.items():
        for one in (each for each in held if each.is_first):
            at = one.region
            places.append([variable, at.rows, at.begin, at.end])
            shape = at.rows, at.end - at.begin
            arrays.append(Unread(np.dtype(one.dtype), shape, one.read, one.path))
    return [path.name, storage.write_file(path, {"shards": places}, arrays, mode)]


def require_whole_parts(folder: Path, parts: Iterable[tuple[str, str]]) -> None:
    """Refuses parts that are missing, or whose bytes are not the bytes that were written."""
    for name, digest in parts:
        try:
            storage.require_whole(folder / name, digest)
        except BackupError as error:
            raise BackupError(f"of its part {name}, {error}") from error
        except OSError as error:
            raise BackupError(f"its part {name} cannot be read: {error}") from error


def remove_orphans(folder: Path, up_to: float = math.inf) -> None:
    """Removes the parts of those backups that have no chief's file.

    Args:
        folder: The folder of the backups.
        up_to: The largest number of a backup whose parts are removed. Parts with larger numbers
            stay, because workers may still be writing them.
    """
    there = set(map(storage.number_of, storage.newest_first(folder)))
    for path in list(folder.glob("backup-*")):
        match = _NAME.fullmatch(path.name)
        if match is not None and int(match[1]) not in there and int(match[1]) <= up_to:
            path.unlink(missing_ok=True)


_Shards = dict[int, list[tuple[Region, StoredFile, int]]]
"""The shards of each variable, by the variable's number.

For each shard: its region, the file that has it, and its index in that file.
"""


@final
class StoredVariables:
    """The variables of a backup, in the chief's file and in the parts.

    If a worker has the same shards as the worker of its rank had when the backup was made, it reads
    only the part of this rank. The chief also reads the headers of all other parts.
    """

    def __init__(self, chiefs: StoredFile, rank: int = 0) -> None:
        """Stores the chief's file and the worker's rank. The chief checks that all shards exist."""
        self.chiefs = chiefs
        # The names and digests of the parts, in the order of the workers' ranks.
        self._parts = chiefs.facts.get("parts", [])
        self._own = self._shards_in(self._parts[rank : rank + 1])
        for variable, form in enumerate(() if rank else chiefs.forms):
            if form is None:
                self._require_all(variable)

    @cached_property
    def _shards(self) -> _Shards:
        return self._shards_in(self._parts)

    def _shards_in(self, parts: Iterable[tuple[str, str]]) -> _Shards:
        found: _Shards = {}
        for name, _ in parts:
            file = StoredFile(self.chiefs.path.with_name(name))
            for index, (variable, *place) in enumerate(file.facts["shards"]):
                found.setdefault(variable, []).append((Region(*place), file, index))
        return found

    def whole(self, variable: int) -> np.ndarray:
        """Reads a whole variable."""
        if self.chiefs.forms[variable] is not None:
            return self.chiefs.array(variable)
        rows = self._shards[variable][0][0].rows
        region = Region(rows, 0, self._size(variable) // rows)
        return self._joined(variable, region).reshape(self._shape(variable))

    def part(self, variable: int, region: Region) -> np.ndarray:
        """Reads a region of a variable.

        The whole variable is read only if the shards in the files have another number of rows than
        `region`.
        """
        if self.chiefs.forms[variable] is not None:
            return self.chiefs.columns(variable, region)
        for one, file, index in self._own.get(variable, ()):
            if one == region:
                return file.columns(index, Region(one.rows, 0, one.end - one.begin))
        if all(one.rows == region.rows for one, _, _ in self._shards[variable]):
            return self._joined(variable, region)
        value = self.whole(variable).reshape(region.rows, -1)
        return value[:, region.begin : region.end].copy()

    def _joined(self, variable: int, region: Region) -> np.ndarray:
        """Joins a region from the shards in the files. The shards must have `region.rows` rows."""
        held = self._shards[variable]
        _, file, index = held[0]
        dtype = np.dtype(file.forms[index][0])
        joined = np.empty((region.rows, region.end - region.begin), dtype)
        for own, file, index in held:
            begin, end = max(own.begin, region.begin), min(own.end, region.end)
            if begin < end:
                columns = Region(region.rows, begin - own.begin, end - own.begin)
                joined[:, begin - region.begin : end - region.begin] = file.columns(index, columns)
        return joined

    def _require_all(self, variable: int) -> None:
        """Refuses parts that do not make up the whole variable."""
        regions = [one for one, _, _ in self._shards.get(variable, ())]
        regions.sort(key=attrgetter("begin", "end"))
        ends = [0, *(one.end for one in regions)]
        is_joined = [one.begin for one in regions] == ends[:-1]
        has_one_form = len({one.rows for one in regions}) == 1
        size = sum(one.size for one in regions)
        if not (is_joined and has_one_form and size == self._size(variable)):
            raise BackupError(f"its parts are not the whole of variable {variable}: {regions}")

    def _shape(self, variable: int) -> Sequence[int]:
        return self.chiefs.facts["shapes"][variable]

    def _size(self, variable: int) -> int:
        return int(np.prod(self._shape(variable), dtype=np.int64))


def variables_of(model: Any) -> list[keras.Variable]:
    """Returns the variables that a model, its optimizer and its metrics have as training begins."""
    slots = keras_compat.slots_of(model)
    metrics = [one for metric in keras_compat.attached_metrics(model) for one in metric.variables]
    return _without_doubles([*model.variables, *slots, *metrics])


def _without_doubles(variables: Iterable[keras.Variable]) -> list[keras.Variable]:
    return list({id(variable): variable for variable in variables}.values())


def all_variables_of(model: keras.Model) -> list[keras.Variable]:
    """Returns what `variables_of` returns, and the variables of a model's other optimizers."""
    more = [variable for one in keras_compat.optimizers_of(model) for variable in one.variables]
    return _without_doubles([*variables_of(model), *more])


def optimized_by(model: keras.Model, variables: Sequence[keras.Variable]) -> list[list[int] | None]:
    """Returns, for each optimizer, the indices in `variables` of the variables it was built for.

    The entry is None if the optimizer is not built, or was built for a variable that `variables`
    does not contain.
    """
    numbers = {id(variable): number for number, variable in enumerate(variables)}
    listed: list[list[int] | None] = []
    for optimizer in keras_compat.optimizers_of(model):
        own = keras_compat.optimized_variables(keras_compat.updating(optimizer))
        is_known = optimizer.built and all(id(one) in numbers for one in own)
        listed.append([numbers[id(one)] for one in own] if is_known else None)
    return listed


def build_optimizers(model: keras.Model, optimized: Sequence[Sequence[int] | None]) -> None:
    """Builds the optimizers that were built when a backup was made, for the same variables."""
    variables = variables_of(model)
    for optimizer, numbers in zip(keras_compat.optimizers_of(model), optimized, strict=True):
        if numbers is not None and not optimizer.built:
            optimizer.build([variables[number] for number in numbers])


def forms_of(variables: Sequence[Any]) -> dict[str, object]:
    """Returns the shapes and types of variables.

    Names are left out, because Keras numbers the names across all models that a process makes.
    """
    return {
        f"variable {number}": [list(variable.shape), variable.dtype]
        for number, variable in enumerate(variables)
    }


def shards_of(variables: Sequence[object], replicas: ReplicaSet) -> dict[int, Sequence[HeldShard]]:
    """Returns this worker's shards of variables that the workers divide.

    The keys are the indices of these variables in `variables`.
    """
    held = {number: replicas.shards(variable) for number, variable in enumerate(variables)}
    return {number: own for number, own in held.items() if own}


def to_write(variables: Sequence[Any], elsewhere: Mapping[int, object]) -> list[Any]:
    """Returns variables' values for a file; most variables are read only when they are written.

    All workers must call this function, and then write the file or call `storage.read_along`.

    Args:
        variables: The variables.
        elsewhere: The variables that other files contain, by their numbers; the returned list has
            None for these variables.
    """
    listed: list[Any] = []
    for number, variable in enumerate(variables):
        if number in elsewhere:
            listed.append(None)
        elif is_on_read(variable):
            listed.append(np.array(ops.convert_to_numpy(variable)))
        else:
            dtype = keras.backend.standardize_dtype(keras_compat.stored_value(variable).dtype)
            read = partial(_value, variable)
            listed.append(Unread(np.dtype(dtype), tuple(variable.shape), read, variable.path))
    return listed


def _value(variable: Any) -> np.ndarray:
    return ops.convert_to_numpy(variable.value)


def add_up_anew(variables: Sequence[Any], arrays: Sequence[object]) -> None:
    """Assigns to each variable of a metric its sum over the replicas, as a restored run does.

    So this run and the restored run add the same numbers in the same order, and their results are
    equal to the last bit. All workers must call this function.
    """
    for variable, value in zip(variables, arrays, strict=True):
        if is_sum_on_read(variable):
            variable.assign(value)


def with_arrays(
    model: Any, stored: StoredVariables | None, facts: Mapping[str, Any], count: int
) -> dict[str, Any]:
    """Returns a backup's facts, with the arrays to which the facts refer by number.

    In the chief's file these arrays follow the arrays of the `count` variables. All workers must
    call this function. `stored` is None on workers that do not see the backup.
    """
    own: list[np.ndarray] = []
    if stored is not None:
        own = [stored.chiefs.array(number) for number in range(count, len(stored.chiefs.forms))]
    arrays = broadcast_arrays(model, own, facts["arrays"])
    return filled(facts, [None] * count + arrays)


def restore(
    model: Any,
    variables: Sequence[tuple[int, Any]],
    stored: StoredVariables | None,
    *,
    seen_by_all: bool,
) -> None:
    """Restores variables, which are given with their numbers in the backup.

    All workers must call this function. If workers divide the variables, the variables are restored
    one after another. If all workers see the files, each worker reads its own shards. Otherwise the
    chief sends whole variables.
    """
    replicas = replicas_of(model)
    if replicas is None or not replicas.divides_state:
        if stored is not None:
            for number, variable in variables:
                variable.assign(stored.whole(number))
        broadcast(model, [variable for _, variable in variables])
        return
    replicas.initial_broadcast.ensure()
    for number, variable in variables:
        if stored is None or not seen_by_all:
            own = [] if stored is None else [stored.whole(number)]
            form = [keras_compat.stored_dtype(variable), variable.shape]
            [value] = broadcast_arrays(model, own, [form])
            variable.assign(value)
            continue
        shards = replicas.shards(variable)
        for shard in shards:
            shard.write(stored.part(number, shard.region))
        if not shards:
            variable.assign(stored.whole(number))


def numbers_of_weights(model: Any, variables: Sequence[Any]) -> list[list[object]]:
    """Returns, for each weight of a model: its index in `variables`, its shape and its type."""
    numbers = {id(variable): number for number, variable in enumerate(variables)}
    return [[numbers[id(one)], list(one.shape), one.dtype] for one in model.weights]


def broadcast_arrays(
    model: keras.Model, arrays: Sequence[np.ndarray], forms: Sequence[Any]
) -> list[np.ndarray]:
    """Returns the chief's arrays on every worker. All workers must call this function.

    ``forms`` has the type and shape of each array; workers other than the chief pass no arrays.
    """
    trainer = trainer_of(model)
    if trainer is None or trainer.replicas.job is None or not forms:
        return list(arrays)
    dtypes = [np.dtype(name) for name, _ in forms]
    sizes = list(map(bytes_of, forms))
    raw = np.zeros(sum(sizes), np.uint8)
    if trainer.replicas.job.is_chief:
        raw[:] = np.frombuffer(b"".join(array.tobytes() for array in arrays), np.uint8)
    with trainer.strategy.scope():
        carrier = keras.Variable(raw, dtype="uint8", trainable=False, name="backup")
    trainer.replicas.initial_broadcast.ensure()  # gives the new variable the chief's value
    received = np.asarray(ops.convert_to_numpy(carrier))
    parts = np.split(received, np.cumsum(sizes)[:-1])
    return [
        part.copy().view(dtype).reshape(shape)
        for part, dtype, (_, shape) in zip(parts, dtypes, forms, strict=True)
    ]
