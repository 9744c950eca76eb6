"""Random draws of a trial: what one device draws, the replicas get, each its own rows."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import keras

from kerasdist.input.sharding import piece_bounds
from kerasdist.keras_seam import ops
from kerasdist.replica_context import ReplicaContext, one_device_replica

# Draws that leave out, scale or reorder what they are given: not done in a trial.
_LEFT_OUT = ("dropout", "shuffle")


class _InDraw(threading.local):
    """Whether the calling thread draws, so that a draw inside of a draw is not counted."""

    active = False


class Draws:
    """Records the draws of the first step of a trial, and gives the same to the steps after it."""

    def __init__(self) -> None:
        """Makes the record, which is empty."""
        self._recorded: list[Any] = []
        self._is_recorded = False
        self._position: dict[Any, int] = {}
        self._in_draw = _InDraw()
        self.misfit: str | None = None

    def begin(self) -> None:
        """Begins a step."""
        self._position.clear()

    def end_recording(self) -> None:
        """Ends the first step; from now on its draws are given again."""
        self._is_recorded = True

    def draw(self, name: str, draw: Callable[[], Any], given: Any) -> Any:
        """Returns what a step of the trial gets for a draw.

        Args:
            name: The name of the function that draws.
            draw: Draws.
            given: What is returned in place of a draw that leaves out or reorders.
        """
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
            self._recorded.append(keras.ops.stop_gradient(drawn))
            return drawn
        replica = one_device_replica()
        key = None if replica is None else replica.replica_id_in_sync_group
        position = self._position.get(key, 0)
        self._position[key] = position + 1
        if position >= len(self._recorded):
            self.misfit = f"the replicas draw by {name} more often than one device does"
            return drawn
        own = _own_rows(self._recorded[position], tuple(drawn.shape), replica)
        if own is None:
            self.misfit = (
                f"{name} draws shape {tuple(drawn.shape)} on a replica and "
                f"{tuple(self._recorded[position].shape)} on one device"
            )
            return drawn
        return ops.cast(own, drawn.dtype)


def _own_rows(recorded: Any, shape: tuple[int, ...], replica: ReplicaContext | None) -> Any:
    """What a replica gets of a tensor that one device drew, None if the shapes do not fit."""
    whole = tuple(recorded.shape)
    if whole == shape:
        return recorded
    share = None if replica is None else replica.share
    if replica is None or share is None or len(whole) != len(shape):
        return None
    size, total = int(share.size), int(share.total)
    axes = [axis for axis, pair in enumerate(zip(whole, shape, strict=True)) if len({*pair}) > 1]
    if len(axes) != 1 or not total:
        return None
    [axis] = axes
    times, rest = divmod(whole[axis], total)
    if rest or shape[axis] != size * times:
        return None
    begin, end = piece_bounds(total, replica.num_replicas_in_sync)[
        int(replica.replica_id_in_sync_group)
    ]
    rows = (slice(None),) * axis + (slice(begin * times, end * times),)
    return recorded[rows]
