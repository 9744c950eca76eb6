"""Variables that the workers of a job divide (`sharding=`): each worker holds a part of the values.

A part is a run of a variable's flattened values, so that any shape and any number of workers fit.
Outside of steps code reads whole values: a read of a divided variable is a collective, and what is
assigned is cut at once.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, Protocol, final

import keras
import numpy as np
import torch

from kerasdist import keras_compat
from kerasdist.agreement.results import checksum_of, unnumbered
from kerasdist.backends.base import metering
from kerasdist.backends.base.checks import differing_assignment
from kerasdist.core.ownership import VariableTable
from kerasdist.core.sharding import HeldPiece, Region
from kerasdist.job.current import current

_shards: VariableTable[Shard] = VariableTable()

# How large a group of small layers' weights becomes: as a bucket of gradients.
_GROUP_BYTES = 25 * 2**20


class Waitable(Protocol):
    """A collective that has started."""

    def wait(self) -> Any:
        """Waits until the collective is done."""


@final
class SumOfParts:
    """A reduce-scatter that has started."""

    def __init__(self, work: Any, sent: torch.Tensor, own: torch.Tensor, dtype: torch.dtype):
        """Keeps what is sent until it is done."""
        self._work = work
        self._sent: torch.Tensor | None = sent
        self._own = own
        self._dtype = dtype

    @property
    def blocks(self) -> bool:
        """Whether `wait` would block this thread; on a GPU it never does."""
        return not (self._own.is_cuda or self._work.is_completed())

    def wait(self) -> None:
        """Waits until it is done, and frees what was sent."""
        if self._sent is not None:
            self._work.wait()
            self._sent = None

    def part(self) -> torch.Tensor:
        """Returns this worker's part of the sum, once it is done."""
        self.wait()
        return self._own.to(self._dtype)


class Workers(Protocol):
    """What sharded variables and buckets of gradients need of a `ProcessGroup`."""

    rank: int
    size: int
    device: torch.device
    bytes_per_pack: int

    def start_sum(self, flat: torch.Tensor, group: Any = None) -> Waitable:
        """Starts an in-place all-reduce."""
        ...

    def start_sum_of_parts(self, flat: torch.Tensor, group: Any = None) -> SumOfParts:
        """Starts a reduce-scatter of equal parts."""
        ...

    def start_gather_of_parts(self, part: torch.Tensor) -> tuple[Waitable, torch.Tensor]:
        """Starts an all-gather of equal parts; returns it, and the tensor that will hold all."""
        ...

    def sums(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns each tensor summed over the workers."""
        ...

    def gather_alike(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the workers' tensors, stacked along a new axis 0."""
        ...


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
        together: The weights with which this one travels; None: it travels alone.
    """

    def __init__(self, shape: tuple[int, ...], group: Workers) -> None:
        """Divides a shape over the workers of a group."""
        size = math.prod(shape)
        self.shape = shape
        self.length = -(-size // group.size)
        self.begin = min(size, group.rank * self.length)
        self.end = min(size, self.begin + self.length)
        self.shows_part = False
        self.group = group
        self.together: WeightGroup | None = None

    @property
    def size(self) -> int:
        """How many elements the variable has."""
        return math.prod(self.shape)

    def part(self, whole: torch.Tensor) -> torch.Tensor:
        """Returns this worker's part of a whole value, as a view where torch can."""
        return whole.detach().reshape(-1)[self.begin : self.end]

    @torch.no_grad()
    def whole(self, part: torch.Tensor) -> torch.Tensor:
        """Returns the value whose parts the workers hold. All workers must call it."""
        work, gathered = self.group.start_gather_of_parts(padded(part.detach(), self.length))
        with metering.waiting_for_workers():
            work.wait()
        return gathered[: self.size].view(self.shape)


@final
class WeightGroup:
    """Weights that are gathered, summed and freed together: a layer's, or those of small layers.

    Workers make variables in one order, and so the same groups. A weight that a worker has freed
    keeps its place in messages.

    Attributes:
        is_open: Whether further weights may join; not after the first message.
        stays: Whether steps keep it gathered to their ends.
        is_used_itself: Whether code outside of layers has got a weight in this step.
        traces: In which order groups were used in the last step that began with this one, by
            whether it had gradients; None stands for an update of weights.
    """

    def __init__(self, variable: Any, shard: Shard) -> None:
        """Starts with one weight."""
        self.members: list[tuple[weakref.ref[Any], Shard]] = []
        self.is_open = True
        self.stays = self.is_used_itself = False
        self.traces: dict[bool, list[WeightGroup | None]] = {}
        self._group = shard.group
        self._part: torch.Tensor = keras_compat.stored_value(variable).new_empty(0)
        self._bytes = 0
        self.add(variable, shard)

    def add(self, variable: Any, shard: Shard) -> None:
        """Takes one more weight."""
        self.members.append((weakref.ref(variable), shard))
        self._layer = variable.path.rpartition("/")[0]
        self._bytes += shard.size * self._part.element_size()
        shard.together = self

    def accepts(self, variable: Any) -> bool:
        """Returns whether a new weight shall join: one of the same layer, or a small one."""
        part, limit = self._part, self._group.bytes_per_pack or _GROUP_BYTES
        stored = keras_compat.stored_value(variable)
        if not self.is_open or (stored.dtype, stored.device) != (part.dtype, part.device):
            return False
        size = math.prod(variable.shape) * stored.element_size()
        return variable.path.rpartition("/")[0] == self._layer or self._bytes + size <= limit

    @torch.no_grad()
    def start_gather(self) -> tuple[Waitable, torch.Tensor]:
        """Starts an all-gather of the weights. All workers must call it."""
        self.is_open = False
        parts = []
        for reference, shard in self.members:
            variable = reference()
            part = self._part if variable is None else keras_compat.stored_value(variable).detach()
            parts.append(padded(part, shard.length))
        return self._group.start_gather_of_parts(torch.cat(parts) if len(parts) > 1 else parts[0])

    def wholes(self, gathered: torch.Tensor) -> Generator[tuple[Any, Shard, torch.Tensor]]:
        """Yields each weight with its value, in memory of its own, out of what was gathered."""
        columns = gathered.view(self._group.size, -1).split([s.length for _, s in self.members], 1)
        for (reference, shard), column in zip(self.members, columns, strict=True):
            variable = reference()
            if variable is not None:
                yield variable, shard, column.contiguous().view(-1)[: shard.size].view(shard.shape)


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
        checksum = checksum_of(value.detach().reshape(-1).view(torch.uint8).cpu().numpy())
    label = f"{work} of the divided variable {unnumbered(variable.path)!r}"
    return len(set(job.all_gather_object(label, checksum))) == 1


@torch.no_grad()
def divide(variable: Any, group: Workers) -> Shard:
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
