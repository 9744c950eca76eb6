"""Checkpoints of Orbax and of torch.distributed.checkpoint in a job: each writes what it holds."""

import os
import shutil
from contextlib import nullcontext
from importlib import import_module

from tests.conformance.cases_checkpoints import (
    TRAIN,
    X,
    Y,
    files_of_at_most,
    large,
    new,
    same,
    state,
)
from tests.conformance.lab import values
from tests.conformance.lazy import kd
from tests.conformance.models import dense
from tests.conformance.registry import case
from tests.environment import find_orbax
from tests.multiprocess.cases_sharded_state import BACKENDS
from tests.multiprocess.loops import calls_of

# Where a backend gathers a sharded variable outside of steps.
_GATHERS = {
    "jax": ("kerasdist.backends.jax.mesh.worker_placement", "WorkerPlacement", "read"),
    "torch": ("kerasdist.backends.torch.state.shards", "Shard", "gather"),
}
# What each worker writes into, by its number.
_WRITTEN = {"jax": "ocdbt.process_{}", "torch": "__{}_0.distcp"}
# The error of a checkpoint of which the last worker's copy is damaged.
_DAMAGED = {
    "jax": r"(on worker {}: )?.*error while reading",
    "torch": r"(on worker {}: ValueError: )?Expected a checkpoint.*has 10000 bytes of",
}
# How the errors of a worker's full disk name a variable and a file. Orbax's own has no worker.
_NO_ROOM = {
    "jax": r'(on worker {0}: )?.*Error writing "\w+_variables\.[\w./]+" in .*ocdbt.process_{0}/',
    "torch": r"worker {}: .*too large, at the variable 'sequential/up/\w+' in '.*/__\d_0.distcp'",
}


@case("workers", backends=BACKENDS)
def into_others(lab):
    """A job's checkpoint is read into each sharding and one device, bit by bit."""
    find_orbax()
    module, owner, name = _GATHERS[lab.backend]
    alone = kd.OneDeviceStrategy("cpu:0")
    shardings = [None, kd.Sharding("optimizer", min_size=1), kd.Sharding("full", min_size=1)]
    model = new(lab.strategy())
    TRAIN(model)
    kept = state(model)
    with lab.folder() as folder:
        path = folder / "steps" / "1"
        for strategy in [lab.strategy(sharding=one) for one in shardings]:
            read = new(strategy)
            with calls_of(getattr(import_module(module), owner), name) as gather:
                kd.save_checkpoint(model, path)
                kd.load_checkpoint(read, path)
            lab.equal([], gather.call_args_list)
            same(kept, state(read))
            model = read
        kd.save_checkpoint(model, path)
        one = new(alone)
        kd.load_checkpoint(one, path)
        same(kept, state(one))
        found = {file.name for file in path.iterdir()}
        lab.equal(["1"], [file.name for file in path.parent.iterdir()])
    lab.check({_WRITTEN[lab.backend].format(lab.job.rank)} <= found, str(found))
    lab.equal(TRAIN(one), TRAIN(model))


def _cut(folder, size):
    for file in folder.rglob("*"):
        if file.is_file() and file.stat().st_size > size:
            os.truncate(file, size)


@case("workers", backends=BACKENDS, like="worker_checkpoints.into_others")
def refused_on_all(lab):
    """What one worker cannot read, or the chief cannot write, is an error on all workers."""
    find_orbax()
    model = new(lab.strategy())
    with lab.folder() as folder:
        path = folder / "1"
        kd.save_checkpoint(model, path)
        before = state(model)
        last = lab.job.num_workers - 1
        of_last = "^Expected" if lab.is_last else f"on worker {last}: ValueError: Expected"
        with lab.raises(ValueError, rf"{of_last} a checkpoint, which.*path='.*2'"):
            kd.load_checkpoint(model, lab.pick(folder / "2", path))
        with lab.raises(ValueError, "Expected a new folder"):
            kd.save_checkpoint(model, folder)
        other = new(lab.strategy(), dense)
        weights = values(other.weights)
        with lab.raises(ValueError, "dense/kernel', which is not there"):
            kd.load_checkpoint(other, path)
        same(weights, values(other.weights))
        kd.load_checkpoint(model, path)
        same(before, state(model))
        larger = new(lab.strategy(sharding=kd.Sharding("full", min_size=1)), large)
        kd.save_checkpoint(larger, folder / "damaged")
        damaged = lab.pick(folder / "2", folder / "damaged")
        if lab.is_last:
            shutil.copytree(folder / "damaged", damaged)
            _cut(damaged, 10_000)
        with lab.raises(Exception, _DAMAGED[lab.backend].format(last)):
            kd.load_checkpoint(larger, damaged)
        if lab.is_last:
            _cut(damaged, 500)
        with lab.raises(ValueError, rf"{of_last} a checkpoint that.*path='.*2', where the shapes"):
            kd.load_checkpoint(larger, damaged)
        if lab.is_last:
            shutil.rmtree(folder / "damaged")
            shutil.rmtree(damaged)
        for rank in (0, last):
            full = files_of_at_most(1 << 14) if lab.job.rank == rank else nullcontext()
            with full, lab.raises(Exception, _NO_ROOM[lab.backend].format(rank)):
                kd.save_checkpoint(larger, path)
            lab.everyone("written")
            lab.equal(["1"], [file.name for file in folder.iterdir()])
            lab.everyone("seen")
        kd.load_checkpoint(model, path)
        same(before, state(model))


@case("workers", backends=BACKENDS, like="worker_checkpoints.into_others")
def beside_backups(lab):
    """A run that goes on from a backup writes a checkpoint; one that began with it, backups."""
    find_orbax()
    strategy = lab.strategy(sharding=kd.Sharding("full", min_size=1))

    def trained(model, epochs, folder=None):
        kept = [kd.callbacks.BackupAndRestore(folder, delete_checkpoint=False)] if folder else []
        options = {"batch_size": 8, "shuffle": False, "verbose": 0, "callbacks": kept}
        model.fit(X, Y, epochs=epochs, **options)
        return state(model)

    with lab.folder() as folder:
        trained(new(strategy), 1, folder / "first")
        restored = new(strategy)
        kept = trained(restored, 2, folder / "first")
        same(trained(new(strategy), 2), kept)
        kd.save_checkpoint(restored, folder / "1")
        runs = [new(strategy) for _ in range(2)]
        for model in runs:
            kd.load_checkpoint(model, folder / "1")
            same(kept, state(model))
        whole = trained(runs[0], 2)
        trained(runs[1], 1, folder / "second")
        same(whole, trained(new(strategy), 2, folder / "second"))
        lab.everyone("ended")
