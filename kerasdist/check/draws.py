"""Random draws of a trial: each replica gets its own rows of the draws of one device."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras

from kerasdist.core import context
from kerasdist.core.protocols import ReplicaLike
from kerasdist.keras_compat import ops

# Draws that drop, scale or reorder their argument: a trial returns the argument itself.
_LEFT_OUT = ("dropout", "shuffle")


class _InDraw(threading.local):
    """Whether the calling thread draws, so that draws within a draw are not recorded."""

    active = False


class _Recorded(NamedTuple):
    name: str
    tensor: Any


class RecordedDraws:
    """Records the draws of the first step of a trial, and repeats them in the steps after it.

    Attributes:
        misfit: Why a draw could not be repeated, None if all could. The step then drew anew.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = tuple(sizes)
        self._recorded: list[_Recorded] = []
        self._is_recorded = False
        self._position: dict[Any, int] = {}
        self._in_draw = _InDraw()
        self.misfit: str | None = None

    def begin(self) -> None:
        """Begins a step of the trial."""
        self._position.clear()

    def end_recording(self) -> None:
        """Ends the first step; from now on its draws are repeated."""
        self._is_recorded = True

    def digest(self, as_array: Callable[[Any], Any]) -> str:
        """Returns a digest of all recorded draws."""
        digest = hashlib.sha256()
        for _, drawn in self._recorded:
            array = as_array(drawn)
            digest.update(f"{array.dtype} {array.shape}".encode())
            digest.update(array.tobytes())
        return digest.hexdigest()

    def draw(self, name: str, draw: Callable[[], Any], given: Any) -> Any:
        """Returns the result of a draw in a step of the trial."""
        if self._in_draw.active:
            return draw()
        if name in _LEFT_OUT:
            return given
        self._in_draw.active = True
        try:
            drawn = draw()
        finally:
            self._in_draw.active = False
        if not keras.ops.is_tensor(drawn):
            return drawn
        if not self._is_recorded:
            self._recorded.append(_Recorded(name, keras.ops.stop_gradient(drawn)))
            return drawn
        return self._repeated(name, drawn)

    def _repeated(self, name: str, drawn: Any) -> Any:
        replica = context.enclosing_replica()
        key = None if replica is None else int(replica.replica_id_in_sync_group)
        if key is not None and not self._sizes[key]:
            return drawn  # an empty replica's stand-in row does not count
        shape = tuple(drawn.shape)
        # Code that draws more often on replicas, or in another order, must not shift all others.
        for position in range(self._position.get(key, 0), len(self._recorded)):
            if self._recorded[position].name == name:
                own = self._own_rows(self._recorded[position].tensor, shape, replica)
                if own is not None:
                    self._position[key] = position + 1
                    return ops.cast(own, drawn.dtype)
        self.misfit = f"{name} draws shape {shape} on a replica, and one device nothing that fits"
        return drawn

    def _own_rows(self, recorded: Any, shape: tuple[int, ...], replica: ReplicaLike | None) -> Any:
        """Returns a replica's rows of a recorded draw, None if the shapes do not fit."""
        whole = tuple(recorded.shape)
        if whole == shape:
            return recorded
        if replica is None or len(whole) != len(shape):
            return None
        number, total = int(replica.replica_id_in_sync_group), sum(self._sizes)
        pairs = enumerate(zip(whole, shape, strict=True))
        axes = [axis for axis, (there, here) in pairs if there != here]
        if len(axes) != 1 or not total:
            return None
        [axis] = axes
        times, rest = divmod(whole[axis], total)
        if rest or shape[axis] != self._sizes[number] * times:
            return None
        begin = sum(self._sizes[:number]) * times
        rows = (slice(None),) * axis + (slice(begin, begin + shape[axis]),)
        return recorded[rows]


class FreshDraws:
    """Draws anew in each step, to see what draws alone change."""

    def draw(self, name: str, draw: Callable[[], Any], given: Any) -> Any:
        """Returns the result of a draw; what `RecordedDraws` leaves out is left out here too."""
        return given if name in _LEFT_OUT else draw()
