"""Backups of state that workers divide: each writes its part, and reads no more than it holds.

On layouts such as 2x1-full.
"""

import contextlib
from importlib import import_module
from unittest import mock

import numpy as np

from tests.conformance.cases_sharding import even
from tests.conformance.interruptions import InterruptionError
from tests.conformance.lab import optimizer_values, values
from tests.conformance.lazy import kd, keras
from tests.conformance.models import regression
from tests.conformance.registry import case
from tests.multiprocess.cases_sharded_state import divides_weights, own_size
from tests.multiprocess.loops import calls_of, noting

# Where a backend gathers a sharded variable outside of steps.
_GATHERS = {
    "jax": ("kerasdist.backends.jax.mesh.worker_placement", "WorkerPlacement", "read"),
    "torch": ("kerasdist.backends.torch.state.shards", "Shard", "gather"),
}


def trained(lab, *callbacks, epochs=3):
    keras.utils.set_random_seed(3)
    model = lab.made(even)
    x, y = regression(12, outputs=4)
    keras.utils.set_random_seed(4)
    model.fit(x, y, batch_size=4, epochs=epochs, verbose=0, callbacks=list(callbacks))
    return model


def state(model):
    return [*values(model.weights), *optimizer_values(model)]


def backups(folder, **options):
    return kd.callbacks.BackupAndRestore(folder, save_freq=2, delete_checkpoint=False, **options)


def names(folder):
    return sorted(one.name for one in folder.iterdir())


def is_part(name):
    return "-part" in name


def held(lab, variables):
    """The bytes that this worker writes of the variables that the workers divide."""
    shards = lab.strategy().replica_set.shards
    found = [one for variable in variables for one in shards(variable)]
    return sum(one.read().nbytes for one in found if one.is_first)


def writers(lab):
    """How many workers write shards; the others hold copies of these."""
    return lab.shards * lab.job.num_workers // lab.replicas


def same(lab, one, other):
    for own, theirs in zip(one, other, strict=True):
        lab.check(np.array_equal(own, theirs), f"{own} instead of {theirs}")


@case("workers")
def each_writes_its_part(lab):
    """A worker writes what it holds, which no other reads; the chief's file names the parts."""
    from kerasdist.callbacks.backup import storage

    written, gathered = [], []
    module, owner, name = _GATHERS[lab.backend]

    with lab.folder() as folder:
        backup = backups(folder)
        save = backup.save

        def saved(*args):
            gathers = calls_of(getattr(import_module(module), owner), name)
            with gathers as gather, calls_of(storage, "write_file") as write:
                save(*args)
            written.extend(call.args[0].name for call in write.call_args_list)
            gathered.extend(gather.call_args_list)

        backup.save = saved
        model = trained(lab, backup)
        lab.everyone("trained")
        lab.equal(gathered, [])
        workers, rank = lab.job.num_workers, lab.job.rank
        own = [name for name in written if is_part(name)]
        lab.equal(len(own), 6)
        lab.equal({name.rpartition("part")[2] for name in own}, {f"{rank}.kdb"})
        part = own[-1]
        lab.equal(len(written), 12 if lab.job.is_chief else 6)
        found = names(folder)
        lab.equal([is_part(name) for name in found], [*[True] * workers, False] * 2)
        slots = model.optimizer.variables
        sharded = [*model.weights, *slots] if divides_weights(lab) else slots
        bytes_here = held(lab, [*model.weights, *slots])
        devices = lab.replicas // workers if rank < writers(lab) else 0
        elements = own_size(lab, [one for one in sharded if tuple(one.shape)])
        lab.equal(bytes_here, 4 * elements * devices)
        size = (folder / part).stat().st_size
        lab.check(bytes_here < size < bytes_here + 2000, f"{size} bytes for {bytes_here}")


@case("workers")
def killed_before_the_chiefs_file(lab):
    """Parts without the chief's file are no backup: the one before is used, to the last bit.

    The run has the numbers of one with the same backups; the parts go.
    """
    from kerasdist.callbacks.backup.run_files import RunFiles

    left, write_part = [4], RunFiles.write_part

    def write(*args):
        parts = write_part(*args)
        left[0] -= 1
        if left[0] == 0:
            raise InterruptionError
        return parts

    dying = mock.patch.object(RunFiles, "write_part", write)
    with lab.folder() as folder:
        expected = state(trained(lab, backups(folder)))
    with lab.folder() as folder:
        with contextlib.suppress(InterruptionError), dying:
            trained(lab, backups(folder))
            lab.check(False, "not interrupted")
        lab.everyone("interrupted")
        workers, found = lab.job.num_workers, names(folder)
        lab.equal(len([name for name in found if is_part(name)]), 3 * workers)
        lab.equal(len(found), 3 * workers + 2)
        orphans = [name for name in found if name.startswith("backup-000000000004")]
        lab.everyone("listed")
        seen = []
        watch = noting("on_train_batch_end", seen)
        same(lab, state(trained(lab, backups(folder), watch)), expected)
        lab.everyone("ended")
        lab.equal(seen, [2, 0, 1, 2])
        lab.check(not set(orphans) & set(names(folder)), f"{orphans} are left")


@case("workers", like="sharded_backups.killed_before_the_chiefs_file")
def folders_of_their_own(lab):
    """Where workers do not see the chief's folder, the chief writes all in one file."""
    expected = state(trained(lab))
    with lab.folder() as folder:
        own = folder / str(lab.job.rank)
        trained(lab, backups(own), epochs=2)
        found = names(own) if own.is_dir() else []
        lab.equal(
            found, ["backup-000000000003.kdb", "backup-000000000004.kdb"][: 2 * lab.job.is_chief]
        )
        ended = state(trained(lab, backups(own)))
        lab.equal(ended, expected)
        # Once all see it, each reads what it holds, and writes its part.
        lab.everyone("trained")
        shared = folder / "0"
        same(lab, state(trained(lab, backups(shared))), ended)
        lab.everyone("read")
        trained(lab, backups(shared), epochs=4)
        lab.everyone("written")
        lab.equal(sum(map(is_part, names(shared))), 2 * lab.job.num_workers)
