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
            self.interval.choose(save, self._wait_for_disk, lambda every: every)
        save()


# sqrt(2 * 8 * 1800) = 169.7, and with Daly's terms less the cost 164.4.
HALF_AN_HOUR, BATCHES = 0.5, 164


def test_after_twenty_batches_the_interval_is_chosen(monkeypatch):
    run = Run(monkeypatch, HALF_AN_HOUR)
    assert run.interval.kept() is None
    run.epoch(1000)
    assert run.backups[:4] == [20, 184, 348, 512]
    assert run.interval.kept() == [BATCHES, 1]


def test_training_does_not_wait_for_a_disk_that_is_slower(monkeypatch):
    run = Run(monkeypatch, HALF_AN_HOUR, disk=300)
    run.epoch(1000)
    assert run.backups[:4] == [20, 320, 620, 920]


def test_or_at_the_end_of_the_first_epoch_in_which_a_batch_could_be_measured(monkeypatch):
    run = Run(monkeypatch, HALF_AN_HOUR)
    for _ in range(4):
        run.epoch(2)
    assert run.backups == [4]


@pytest.mark.parametrize(
    ("epochs", "batches", "backups"),
    [(6, 60, [20, 120, 240, 360]), (2, 200, [20, 184, 348]), (3, 200, [20, 184, 348, 512, 600])],
)
def test_an_end_of_an_epoch_has_a_backup_if_half_of_the_interval_has_passed(
    monkeypatch, epochs, batches, backups
):
    """Batches are counted over the ends of epochs."""
    run = Run(monkeypatch, HALF_AN_HOUR)
    for _ in range(epochs):
        run.epoch(batches)
    assert run.backups == backups


def test_a_run_that_is_started_again_goes_on_with_the_interval_of_the_backup(monkeypatch):
    run = Run(monkeypatch, 1.0, kept=[BATCHES, 1])
    run.epoch(500, passed=184)
    assert run.backups == [348, 500]


def test_with_another_number_of_replicas_the_interval_is_chosen_anew(monkeypatch):
    run = Run(monkeypatch, HALF_AN_HOUR, kept=[7, 2], replicas=4)
    run.epoch(30, passed=5)
    assert run.backups == [25]
    assert run.interval.kept() == [BATCHES, 4]


def test_the_default_is_divided_by_the_number_of_replicas(monkeypatch):
    run = Run(monkeypatch, None, replicas=64)
    run.epoch(30)
    seconds = best_seconds(8, interval.DEVICE_HOURS * 3600 / 64)
    assert run.interval.kept() == [round(seconds), 64]


def test_an_execution_of_several_batches_is_not_divided(monkeypatch):
    run = Run(monkeypatch, HALF_AN_HOUR, at_once=8)
    run.epoch(600)
    assert run.backups[:3] == [160, 328, 496]


@pytest.mark.parametrize("hours", [0, -1, float("nan"), float("inf")])
def test_a_time_between_failures_that_has_no_meaning_is_refused(hours):
    with pytest.raises(ValueError, match="Expected a positive number of hours_between_failures"):
        kd.callbacks.BackupAndRestore("here", "auto", hours_between_failures=hours)


def test_a_time_between_failures_that_nothing_uses_is_refused():
    with pytest.raises(ValueError, match=r"Received: hours_between_failures=2, save_freq=3\."):
        kd.callbacks.BackupAndRestore("here", 3, hours_between_failures=2)
    with pytest.raises(ValueError, match=r"'epoch', 'auto' or a positive number .*'often'"):
        kd.callbacks.BackupAndRestore("here", "often")
