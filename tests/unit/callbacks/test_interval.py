"""When a backup is due: Daly's formula by his own figures, and the choice by a test's clock."""

import pytest

import kerasdist as kd
from kerasdist.callbacks.backup import interval
from kerasdist.callbacks.backup.interval import Interval, best_seconds


@pytest.mark.parametrize(
    ("hours", "minutes"), [(24, 117), (6, 57), (0.25, 9.1)], ids=["fig. 3", "fig. 4", "fig. 5"]
)
def test_the_formula_gives_what_daly_gives_for_a_dump_of_five_minutes(hours, minutes):
    found = best_seconds(cost=300, between_failures=hours * 3600) / 60
    assert found == pytest.approx(minutes, abs=0.05 if minutes < 10 else 0.5)


def test_a_backup_that_takes_longer_than_failures_come_is_made_at_their_mean_time():
    assert best_seconds(cost=21, between_failures=10) == 10
    assert best_seconds(cost=20, between_failures=10) == 10


class Run:
    """A run of `fit`, whose clock says that a batch takes a second and a backup eight."""

    def __init__(self, monkeypatch, hours, kept=None, replicas=1, at_once=1, disk=0):
        self.time, self.backups, self.count, self.disk = 0.0, [], 0, disk
        monkeypatch.setattr(interval, "perf_counter", lambda: self.time)
        self.interval = Interval("auto", hours)
        self.interval.train_begins(at_once, replicas, kept)
        self.at_once = at_once

    def epoch(self, batches, passed=0):
        self.interval.epoch_begins(passed)
        self.count += passed
        for done in range(passed + self.at_once, batches + 1, self.at_once):
            self.time += self.at_once
            self.count += self.at_once
            self.interval.batches_passed(done, lambda: None)
            if self.interval.is_due(done):
                self._save(done)
        if self.interval.is_due_at_end():
            self._save(0)

    def _wait_for_disk(self):
        self.time += self.disk
        self.disk = 0

    def _save(self, batches):
        def save():
            self.time += 8
            self.interval.saved(batches)

        self.backups.append(self.count)
        if self.interval.is_open:
            self.interval.choose(save, self._wait_for_disk)
        save()


# sqrt(2 * 8 * 1800) = 169.7, and with Daly's terms less the cost 164.4.
HALF_AN_HOUR, BATCHES = 0.5, 164


@pytest.mark.parametrize(
    ("options", "epochs", "backups"),
    [
        # After twenty batches the interval is chosen; training waits for no slower disk.
        ({}, [1000], [20, 184, 348, 512]),
        ({"disk": 300}, [1000], [20, 320, 620, 920]),
        # Or at the end of the first epoch in which a batch could be measured.
        ({}, [2] * 4, [4]),
        # An end of an epoch has a backup if half of the interval has passed; batches are counted
        # over the ends of epochs.
        ({}, [60] * 6, [20, 120, 240, 360]),
        ({}, [200] * 2, [20, 184, 348]),
        ({}, [200] * 3, [20, 184, 348, 512, 600]),
        # An execution of several batches is not divided.
        ({"at_once": 8}, [600], [160, 328, 496]),
    ],
)
def test_when_backups_are_made(monkeypatch, options, epochs, backups):
    run = Run(monkeypatch, HALF_AN_HOUR, **options)
    assert run.interval.kept() is None
    for batches in epochs:
        run.epoch(batches)
    found = run.backups if len(epochs) > 1 else run.backups[: len(backups)]
    assert found == backups


@pytest.mark.parametrize(
    ("hours", "kept", "replicas", "epoch", "backups", "chosen"),
    [
        # A run that is started again goes on with the interval of the backup.
        (1.0, [BATCHES, 1], 1, (500, 184), [348, 500], [BATCHES, 1]),
        # With another number of replicas it is chosen anew; the default is divided by it.
        (HALF_AN_HOUR, [7, 2], 4, (30, 5), [25], [BATCHES, 4]),
        (
            *(None, None, 64, (30, 0), [20]),
            [round(best_seconds(8, interval.DEVICE_HOURS * 3600 / 64)), 64],
        ),
    ],
)
def test_the_interval_goes_with_the_backups(
    monkeypatch, hours, kept, replicas, epoch, backups, chosen
):
    run = Run(monkeypatch, hours, kept=kept, replicas=replicas)
    run.epoch(*epoch)
    assert run.backups == backups
    assert run.interval.kept() == chosen


@pytest.mark.parametrize("hours", [0, -1, float("nan"), float("inf")])
def test_a_time_between_failures_that_has_no_meaning_is_refused(hours):
    with pytest.raises(ValueError, match="Expected a positive number of hours_between_failures"):
        kd.callbacks.BackupAndRestore("here", "auto", hours_between_failures=hours)


def test_a_time_between_failures_that_nothing_uses_is_refused():
    with pytest.raises(ValueError, match=r"Received: hours_between_failures=2, save_freq=3\."):
        kd.callbacks.BackupAndRestore("here", 3, hours_between_failures=2)
    with pytest.raises(ValueError, match=r"'epoch', 'auto' or a positive number .*'often'"):
        kd.callbacks.BackupAndRestore("here", "often")
