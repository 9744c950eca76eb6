"""Notices a loss that is not finite on one replica alone: bad data, not a model that diverges."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import final

import torch

from kerasdist.user_warnings import warn_user

# Looking at a tensor waits for its device, so it is done seldom.
_LOOK_AFTER_STEPS = 1000


@final
class LossWatch:
    """Collects the replicas' losses and looks at them from time to time; warns once."""

    def __init__(self, everyone: Callable[[list[bool]], list[list[bool]]] | None = None) -> None:
        """Starts with no loss.

        Args:
            everyone: Where the other replicas are in other processes: returns what each of them
                has found, of what this one has.
        """
        self._everyone = everyone
        self._steps: list[Sequence[torch.Tensor]] = []
        self._warned = False

    def note(self, losses: Sequence[torch.Tensor | None]) -> None:
        """Notes the losses of one step.

        Args:
            losses: One a replica; None where the step computes none.
        """
        if self._warned or losses[0] is None:
            return
        self._steps.append(losses)  # type: ignore[arg-type]
        if len(self._steps) == _LOOK_AFTER_STEPS:
            self.look()

    def look(self) -> None:
        """Warns if a step's loss was finite on some replicas and not on others.

        Waits for each replica's device once, however many steps there were.
        """
        steps, self._steps = self._steps, []
        if not steps:
            return
        for good in self._finite(steps):
            if any(good) and not all(good):
                self._warned = True
                bad = [str(rank) for rank, well in enumerate(good) if not well]
                warn_user(
                    f"The loss is not finite on replica {', '.join(bad)} of {len(good)}, while "
                    "it is on the others. Look for values that are not finite in the batch; the "
                    "replica's share of it are consecutive rows."
                )
                return
            if not all(good):
                return  # everywhere, as one device would show it

    def _finite(self, steps: list[Sequence[torch.Tensor]]) -> Iterator[list[bool]]:
        """Whether each replica's loss is finite, step by step."""
        if self._everyone is not None:
            here = _are_finite([loss for [loss] in steps])
            yield from map(list, zip(*self._everyone(here), strict=True))
            return
        ranks = range(max(len(losses) for losses in steps))
        finite = [
            iter(_are_finite([losses[rank] for losses in steps if rank < len(losses)]))
            for rank in ranks
        ]
        for losses in steps:
            yield [next(finite[rank]) for rank in range(len(losses))]


def _are_finite(losses: Sequence[torch.Tensor]) -> list[bool]:
    """Whether each loss is finite, in one look at their device."""
    if all(loss.shape == losses[0].shape for loss in losses):
        return torch.stack([*losses]).isfinite().reshape(len(losses), -1).all(1).tolist()
    return torch.stack([loss.isfinite().all() for loss in losses]).tolist()
