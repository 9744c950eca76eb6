"""Notices a loss that is not finite on one replica alone: bad data, not a model that diverges."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import final

import torch

# Looking at a tensor waits for its device, so it is done seldom.
_LOOK_AFTER_STEPS = 1000


@final
class LossWatch:
    """Collects the replicas' losses and looks at them from time to time; warns once."""

    def __init__(self) -> None:
        """Starts with no loss."""
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
        """Warns if a step's loss was finite on some replicas and not on others."""
        steps, self._steps = self._steps, []
        for losses in steps:
            finite = [bool(loss.isfinite().all()) for loss in losses]
            if any(finite) and not all(finite):
                self._warned = True
                bad = [str(rank) for rank, good in enumerate(finite) if not good]
                warnings.warn(
                    f"The loss is not finite on replica {', '.join(bad)} of {len(finite)}, while "
                    "it is on the others. Look for values that are not finite in the batch; the "
                    "replica's share of it are consecutive rows.",
                    stacklevel=4,
                )
                return
            if not all(finite):
                return  # everywhere, as one device would show it
