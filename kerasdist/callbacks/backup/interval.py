"""After how many batches a backup is due, and how that is found where the user leaves it open.

It is chosen once for a run, after its first backup, and is a part of the backups that follow: so a
run that is started again backs up where the run that nothing interrupts does. Chosen anew by each
process, the clock would decide where the sums of metrics are rounded.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Literal, final

# What one device is assumed to run between two failures: a guess, on the careful side. Llama 3's
# 16,384 GPUs were interrupted 419 times in 54 days (Grattafiori et al. 2024, "The Llama 3 Herd of
# Models"), once in 50,000 hours of a GPU; spot machines go far more often.
DEVICE_HOURS = 8_000.0

# Executions of the train function: those that compile it, and those before the first backup.
_COMPILING, _FIRST = 3, 20

_logger = logging.getLogger("kerasdist")


def best_seconds(cost: float, between_failures: float) -> float:
    """Returns how long to train from one backup to the next, so that the least time is lost.

    Daly's formula (2006), which corrects that of Young (1974), ``sqrt(2 * cost * mtbf)``.

    Args:
        cost: For how many seconds training stands still for a backup.
        between_failures: The mean time between failures, in seconds.
    """
    ratio = cost / (2 * between_failures)
    if ratio >= 1:
        return between_failures
    return math.sqrt(2 * cost * between_failures) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost


@final
class Interval:
    """After how many batches of training a backup is due.

    With a number it is each so many batches of an epoch, and at its end. With ``"auto"`` batches
    are counted from one backup to the next, over the ends of epochs; of these a backup is made if
    half of the batches have passed, since to go on from an end is cheaper.

    Attributes:
        is_open: Whether the number of batches is still to be chosen.
    """

    def __init__(
        self, save_freq: Literal["epoch", "auto"] | int, hours_between_failures: float | None
    ) -> None:
        self._is_auto = save_freq == "auto"
        self._hours = hours_between_failures
        self._every = 0 if isinstance(save_freq, str) else save_freq
        self.is_open = False
        self._replicas = self._at_once = 1
        # The batches of this epoch, and after how many of them was the last backup.
        self._passed = self._last = 0
        # Batches that this process has trained on; those of them before the clock was started.
        self._trained = self._before = 0
        self._since: float | None = None

    def train_begins(self, at_once: int, replicas: int, kept: Sequence[int] | None) -> None:
        """Takes what a backup has kept; ``at_once`` is how many batches an execution has."""
        self._passed = self._last = self._trained = 0
        self._at_once, self._replicas, self._since = at_once, replicas, None
        if self._is_auto:
            every, of_replicas = map(int, kept or (0, 0))
            self.is_open = of_replicas != replicas
            self._every = _FIRST * at_once if self.is_open else every

    def kept(self) -> list[int] | None:
        """Returns what a backup keeps."""
        return [self._every, self._replicas] if self._is_auto and not self.is_open else None

    def epoch_begins(self, passed: int = 0) -> None:
        """Begins to count; ``passed`` batches were trained on before the backup."""
        self._last = passed or (self._last - self._passed if self._is_auto else 0)
        self._passed = passed

    def batches_passed(self, count: int, wait: Callable[[], None]) -> None:
        """Keeps how many batches of the epoch were trained on; ``wait`` waits for the devices."""
        self._trained += count - self._passed
        self._passed = count
        if self.is_open and self._since is None and self._trained >= _COMPILING * self._at_once:
            wait()
            self._before, self._since = self._trained, perf_counter()

    def saved(self, batches: int) -> None:
        """Hears of a backup after so many batches of the epoch, 0: at its end."""
        self._last = batches
        if not batches:
            self._passed = 0

    def is_due(self, count: int, before: int | None = None) -> bool:
        """Returns whether a backup is due after so many batches of the epoch.

        ``before`` is how many it had when that was last asked, or None: since the last backup.
        """
        begin = self._last if self._is_auto else 0
        before = self._last if before is None else before
        return self._every > 0 and (count - begin) // self._every > (before - begin) // self._every

    def is_due_at_end(self) -> bool:
        """Returns whether a backup is due at the end of the epoch."""
        if self.is_open:
            return self.is_measured
        return not self._is_auto or 2 * (self._passed - self._last) >= self._every

    @property
    def is_measured(self) -> bool:
        """Whether it is known what a batch takes."""
        return self._since is not None and self._trained > self._before

    def choose(
        self, save: Callable[[], None], wait: Callable[[], None], agree: Callable[[int], int]
    ) -> None:
        """Chooses the number of batches by what ``save`` takes.

        They take no less than ``wait``, for the disk, for which the next backup would wait.
        ``agree`` returns the chief's number on every worker. All workers must call it.
        """
        assert self._since is not None  # since `is_measured`
        begin = perf_counter()
        seconds = (begin - self._since) / (self._trained - self._before)
        save()
        cost = perf_counter() - begin
        wait()
        least = perf_counter() - begin - cost
        hours = DEVICE_HOURS / self._replicas if self._hours is None else self._hours
        best = max(best_seconds(cost, hours * 3600), least)
        self._every = agree(max(round(best / seconds), 1))
        self.is_open = False
        said = (
            "A backup takes %.3g s, and a batch %.3g s. With a failure each %.3g hours there is a "
            "backup each %d batches."
        )
        _logger.info(said, cost, seconds, hours, self._every)
