"""Decides after how many batches a backup is due, and chooses this number if the user sets none.

The number is chosen once for a run, after the first backup, and each backup stores the number. So a
restarted run saves its backups at the same batches as an uninterrupted run. Otherwise the two runs
could differ in the last bits, because a backup rounds the sums of metrics: if each process chose
the number anew, measured times would decide at which batches the sums are rounded.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Literal, final

from kerasdist.job.job import Job

# The hours that one device is assumed to run between two failures: a cautious guess.
# Llama 3's 16,384 GPUs were interrupted 419 times in 54 days, once in 50,000 hours of a GPU.
# (Grattafiori et al. 2024, "The Llama 3 Herd of Models".) Spot machines fail far more often.
DEVICE_HOURS = 8_000.0

# With "auto", the first `_COMPILING` calls of the train function are not timed, because they may
# compile it. The first backup is made after `_FIRST` calls.
_COMPILING, _FIRST = 3, 20

_logger = logging.getLogger("kerasdist")


def best_seconds(cost: float, between_failures: float) -> float:
    """Returns how many seconds to train between two backups, so that the least time is lost.

    This is Daly's formula (2006), an improvement of Young's formula (1974), ``sqrt(2 * cost *
    mtbf)``.

    Args:
        cost: The seconds for which training stops for a backup.
        between_failures: The mean time between failures, in seconds.
    """
    ratio = cost / (2 * between_failures)
    if ratio >= 1:
        return between_failures
    return math.sqrt(2 * cost * between_failures) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost


@final
class Interval:
    """Counts batches of training, and decides after which of them a backup is due.

    If `save_freq` is a number, a backup is due each time that this number of batches has passed in
    an epoch, and at the end of the epoch. With ``"auto"``, batches are counted from one backup to
    the next, across the ends of epochs. At the end of an epoch a backup is then due if half of the
    chosen number has passed, because a restart from the end of an epoch costs less than a restart
    from the middle of an epoch.

    Attributes:
        is_open: Whether the number of batches between two backups is still to be chosen.
    """

    def __init__(
        self, save_freq: Literal["epoch", "auto"] | int, hours_between_failures: float | None
    ) -> None:
        self._is_auto = save_freq == "auto"
        self._hours = hours_between_failures
        self._every = 0 if isinstance(save_freq, str) else save_freq
        self.is_open = False
        self._replicas = self._at_once = 1
        # The batches of this epoch so far, and after how many of them the last backup was made.
        self._passed = self._last = 0
        # At the time `_since`, this process begins to measure how long a batch takes. Up to now it
        # has trained on `_trained` batches, and on `_before` of these before that time.
        self._trained = self._before = 0
        self._since: float | None = None

    def train_begins(self, at_once: int, replicas: int, kept: Sequence[int] | None) -> None:
        """Begins to count the batches of a call of `fit`.

        ``at_once`` is the number of batches in a call of the train function. ``kept`` is what the
        method `kept` returned for the backup from which the run continues; None if there is none.
        """
        self._passed = self._last = self._trained = 0
        self._at_once, self._replicas, self._since = at_once, replicas, None
        if self._is_auto:
            every, of_replicas = map(int, kept or (0, 0))
            self.is_open = of_replicas != replicas
            self._every = _FIRST * at_once if self.is_open else every

    def kept(self) -> list[int] | None:
        """Returns the chosen number of batches and the number of replicas; None if none is chosen.

        If a restarted run has another number of replicas, it chooses a number of batches anew.
        """
        return [self._every, self._replicas] if self._is_auto and not self.is_open else None

    def epoch_begins(self, passed: int = 0) -> None:
        """Starts to count the batches of an epoch.

        If the run continues within this epoch, ``passed`` is the number of batches of the epoch
        that were trained on before the restart.
        """
        self._last = passed or (self._last - self._passed if self._is_auto else 0)
        self._passed = passed

    def batches_passed(self, count: int, wait: Callable[[], None]) -> None:
        """Records that training has passed `count` batches of the epoch.

        ``wait`` waits for the devices. It is called just before the timing of batches begins.
        """
        self._trained += count - self._passed
        self._passed = count
        if self.is_open and self._since is None and self._trained >= _COMPILING * self._at_once:
            wait()
            self._before, self._since = self._trained, perf_counter()

    def saved(self, batches: int) -> None:
        """Records a backup after `batches` batches of the epoch; 0 means at the epoch's end."""
        self._last = batches
        if not batches:
            self._passed = 0

    def is_due(self, count: int, before: int | None = None) -> bool:
        """Returns whether a backup is due after `count` batches of the epoch.

        ``before`` is how many batches of the epoch had passed at the previous check; None means at
        the last backup.
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
        """Whether the time of a batch is known."""
        return self._since is not None and self._trained > self._before

    def choose(
        self, save: Callable[[], None], wait: Callable[[], None], job: Job | None = None
    ) -> None:
        """Chooses the number of batches between two backups, from the time that ``save`` takes.

        ``wait`` waits until a backup is on the disk. Training between two backups must take at
        least as long as this wait, so that no backup has to wait for the backup before it. All
        workers of the `job` must call this method; they use the chief's number.
        """
        assert self._since is not None  # because `is_measured` is True
        begin = perf_counter()
        seconds = (begin - self._since) / (self._trained - self._before)
        save()
        cost = perf_counter() - begin
        wait()
        least = perf_counter() - begin - cost
        hours = DEVICE_HOURS / self._replicas if self._hours is None else self._hours
        best = max(best_seconds(cost, hours * 3600), least)
        self._every = max(round(best / seconds), 1)
        if job is not None:
            self._every = job.broadcast_object("batches between backups", self._every)
        self.is_open = False
        said = (
            "A backup takes %.3g s, and a batch %.3g s. With a failure every %.3g hours, a backup "
            "is made every %d batches."
        )
        _logger.info(said, cost, seconds, hours, self._every)
