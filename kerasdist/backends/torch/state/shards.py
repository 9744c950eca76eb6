"""Variables that the workers of a job divide (`sharding=`): each worker holds a part of the values.

A part is a run of a variable's flattened values, so that any shape and any number of workers fit.
Outside of steps code reads whole values: a read of a divided variable is a collective, and what is
assigned is cut at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, final

import keras
import numpy as np
import torch

from kerasdist import keras_compat
from kerasdist.backends.base import checksums, metering
from kerasdist.backends.base.checks import differing_assignment
from kerasdist.backends.base.initial_broadcast import unnumbered
from kerasdist.backends.base.pieces import HeldPiece, Region
from kerasdist.core.variable_table import VariableTable
from kerasdist.job.current import current

if TYPE_CHECKING:
    from kerasdist.backends.torch.workers.process_group import ProcessGroup

_shards: VariableTable[Shard] = VariableTable()


@final
class Shard:
    """How the workers divide one variable.

    Attributes:
        shape: The variable's shape.
        begin: Where this worker's part begins in the flattened values.
        end: Where it ends; the last workers' parts may be shorter, or empty.
        length: How long the first worker's part is, and so each part in a message.
        group: The workers.
        shows_part: Whether Keras sees the part in place of the variable, as in an update.
    """

    def __init__(self, shape: tuple[int, ...], group: ProcessGroup) -> None:
        """Divides a shape over the workers of a group."""
        size = math.prod(shape)
        self.shape = shape
        self.length = -(-size // group.size)
        self.begin = min(size, group.rank * self.length)
        self.end = min(size, self.begin + self.length)
        self.shows_part = False
        self.group = group

    @property
    def size(self) -> int:
        """How many elements the variable has."""
        return math.prod(self.shape)

    def part(self, whole: torch.Tensor) -> torch.Tensor:
        """Returns this worker's part of a whole value, as a view where torch can."""
        return whole.detach().reshape(-1)[self.begin : self.end]

    @property
    def padded_size(self) -> int:
        """How many elements a message of all parts has."""
        return self.length * self.group.size

    @torch.no_grad()
    def whole(self, part: torch.Tensor) -> torch.Tensor:
        """Returns the value whose parts the workers hold. All workers must call it."""
        work, gathered = self.group.start_gather_of_parts(padded(part.detach(), self.length))
        with metering.waiting_for_workers():
            work.wait()
        return gathered[: self.size].view(self.shape)


def padded(flat: torch.Tensor, length: int) -> torch.Tensor:
    """Returns flattened values, with zeros behind them up to a length."""
    return flat if len(flat) == length else torch.nn.functional.pad(flat, (0, length - len(flat)))


def shard_of(variable: Any) -> Shard | None:
    """Returns how the workers divide a variable, None if each holds it whole, as in a trial."""
    return _shards.get(variable) if keras_compat.trial() is None else None


def gathered(variable: Any) -> torch.Tensor | None:
    """Returns a variable's value. All workers must call it with the same variables."""
    stored, shard = keras_compat.stored_value(variable), _shards.get(variable)
    if shard is None or stored is None:
        return stored
    return shard.whole(stored).requires_grad_(stored.requires_grad)


def whole_value(variable: Any) -> torch.Tensor:
    """Returns a variable's value. All workers must call it if they divide the variable."""
    stored, shard = keras_compat.stored_value(variable), _shards.get(variable)
    if shard is None:
        return stored
    _meet("read", variable)
    return shard.whole(stored)


def _meet(work: str, variable: Any, value: torch.Tensor | None = None) -> bool:
    """Waits for the other workers to do the same; returns whether all have the same value.

    A worker that comes alone ends the job, with an error that names what each worker is at.
    """
    job = current()
    assert job is not None  # one process divides nothing
    checksum = 0
    if value is not None:  # its bytes, as NumPy lacks some types
        checksum = checksums.of_array(value.detach().reshape(-1).view(torch.uint8).cpu().numpy())
    label = f"{work} of the divided variable {unnumbered(variable.path)!r}"
    return len(set(job.all_gather_object(label, checksum))) == 1


@torch.no_grad()
def divide(variable: Any, group: ProcessGroup) -> Shard:
    """Keeps only this worker's part of a variable."""
    shard = Shard(tuple(variable.shape), group)
    stored = keras_compat.stored_value(variable)
    part = torch.nn.Parameter(shard.part(stored).clone(), requires_grad=stored.requires_grad)
    keras_compat.store_value(variable, part)
    _shards.put(variable, shard)
    return shard


def pieces(variable: Any) -> list[HeldPiece]:
    """Returns this worker's piece of a divided variable; nothing of another."""
    shard = _shards.get(variable)
    if shard is None:
        return []
    part = keras_compat.stored_value(variable)

    def write(values: np.ndarray[Any, Any]) -> None:
        with torch.no_grad():
            part.copy_(keras_compat.ops.convert_to_tensor(values.reshape(-1)))

    region = Region(1, shard.begin, shard.end)
    dtype = keras.backend.standardize_dtype(part.dtype)
    return [HeldPiece(region, dtype, lambda: keras_compat.ops.convert_to_numpy(part), write)]


@contextmanager
def whole(variables: Iterable[Any]) -> Generator[None]:
    """Lets each worker hold variables whole for a while. All workers must enter it."""
    before = [
        (variable, shard, keras_compat.stored_value(variable))
        for variable in variables
        if (shard := _shards.get(variable)) is not None
    ]
    for variable, shard, part in before:
        value = torch.nn.Parameter(shard.whole(part), requires_grad=part.requires_grad)
        keras_compat.store_value(variable, value)
        _shards.discard(variable)
    try:
        yield
    finally:
        for variable, shard, part in before:
            with torch.no_grad():
                part.copy_(shard.part(keras_compat.stored_value(variable)))
            keras_compat.store_value(variable, part)
            _shards.put(variable, shard)


@contextmanager
def shown(variable: Any, shard: Shard, part: torch.Tensor) -> Generator[None]:
    """Lets Keras see a part of a variable in its place."""
    before = keras_compat.stored_value(variable)
    keras_compat.store_value(variable, part)
    keras_compat.store_shape(variable, tuple(part.shape))
    shard.shows_part = True
    try:
        yield
    finally:
        keras_compat.store_value(variable, before)
        keras_compat.store_shape(variable, shard.shape)
        shard.shows_part = False


@final
class _Reading:
    """Whether code now reads this worker's parts in place of values."""

    parts = False


@cache
def install() -> None:
    """Changes how Keras reads and writes variables, once per process."""
    keras_compat.install(read_whole=_read, store=_store, track=_track)


def _track(original: Callable[..., None], *args: Any) -> None:
    """Lets a layer register parts as its parameters."""
    before, _Reading.parts = _Reading.parts, True
    try:
        original(*args)
    finally:
        _Reading.parts = before


def _read(original: Callable[[Any], Any], variable: Any) -> Any:
    shard = _shards.get(variable)
    if shard is None or shard.shows_part or _Reading.parts or keras_compat.is_symbolic():
        return original(variable)
    scope = keras_compat.stateless_scope()
    if scope is not None and scope.get_current_value(variable) is not None:
        return original(variable)
    return keras_compat.autocast(variable, whole_value(variable))


@torch.no_grad()
def _store(original: Callable[..., None], variable: Any, value: torch.Tensor) -> None:
    shard = _shards.get(variable)
    if shard is None or shard.shows_part:
        original(variable, value)
        return
    if not _meet("assignment", variable, value):
        raise differing_assignment(variable)
    keras_compat.stored_value(variable).copy_(shard.part(value))
