"""`save_freq="auto"`: the interval is chosen once, and goes with the backups."""

import contextlib
import itertools
from unittest import mock

from kerasdist.callbacks.backup import interval
from tests.conformance.cases_restarts.sources import tf_data
from tests.conformance.interruptions import BATCH, InterruptionError, arrays, run, same
from tests.conformance.lazy import kd
from tests.conformance.registry import case

# The clock of this test goes on by a second each time that it is read. So the five batches between
# the compiled ones and the end of the first epoch take 0.2 s each, and a backup a second. By the
# formula there is one second, or five batches, between two backups, if failures come as often.
CHOSEN = {"save_freq": "auto", "hours_between_failures": 1.35 / 3600}


def interrupted_anywhere(lab, data):
    saved = []
    save = kd.callbacks.BackupAndRestore.save

    def noting(backup, epoch, batches):
        saved.append((epoch, batches))
        save(backup, epoch, batches)

    def script(folder, at=None):
        saved.clear()
        with contextlib.suppress(InterruptionError):
            return run(lab, folder, data, at=at, backups=CHOSEN.items())
        return None

    with (
        mock.patch.object(kd.callbacks.BackupAndRestore, "save", noting),
        mock.patch.object(interval, "perf_counter", itertools.count().__next__),
        lab.folder() as whole,
        lab.folder() as torn,
    ):
        expected = script(whole)
        # The end of the first epoch shows what a backup takes; those of the others come three
        # batches after a backup, more than half of five.
        lab.equal(saved, [(1, 0), (1, 0), (1, 5), (2, 0), (2, 5), (3, 0)])
        for at, made in ((7, []), (14, [(1, 0), (1, 0), (1, 5)]), (22, [(2, 0), (2, 5)])):
            lab.check(script(torn, at) is None, f"not interrupted at batch {at}")
            lab.equal(saved, made)
        found = script(torn)
        lab.equal(saved, [(3, 0)])
    for name, one in expected.items():
        lab.check(same(found[name], one), f"{name}: {found[name]} instead of {one}")


@case("restarts", replicas=(2,))
def auto(lab):
    """`save_freq="auto"`: an interrupted run backs up where the other does, and is equal to it."""
    interrupted_anywhere(lab, arrays())


@case("restarts", replicas=(2,))
def auto_prefetched(lab):
    """`save_freq="auto"` with a `tf.data` pipeline that is shuffled, and read ahead."""
    interrupted_anywhere(lab, tf_data(lambda rows: rows.shuffle(16).batch(BATCH).prefetch(4)))
