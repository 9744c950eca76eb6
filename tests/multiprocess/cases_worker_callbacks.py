"""Callbacks on several workers: who writes, who decides, and how a run goes on.

That an interrupted run ends as one that was not: the exactness suite's `restarts.averages` there.
"""

import contextlib
import itertools
from unittest import mock

import numpy as np

from tests.conformance import interruptions
from tests.conformance.cases_async_checkpoint import disk
from tests.conformance.cases_telemetry import lines_of, of_kind, require_sound, slow_batches
from tests.conformance.interruptions import (
    InterruptionError,
    exact,
    full_disk,
    interrupting_after,
    with_chosen_interval,
)
from tests.conformance.lab import optimizer_values, values
from tests.conformance.lazy import kd, keras, tf
from tests.conformance.models import dense, regression
from tests.conformance.registry import case
from tests.multiprocess.cases_sharded_backups import writers
from tests.multiprocess.loops import noting

ROWS, BATCH, BATCHES = 22, 5, 5


def _model(lab):
    keras.utils.set_random_seed(11)
    return lab.made(lambda: dense("adam"))


def _fit(model, callbacks, epochs=3, **options):
    keras.utils.set_random_seed(12)
    x, y = regression(ROWS)
    arguments = {"batch_size": BATCH, "epochs": epochs, "verbose": 0, **options}
    return model.fit(x, y, callbacks=callbacks, **arguments)


@case("workers")
def metrics_reduction(lab):
    """MetricsReduction makes one of the workers' own logs; LearningRateWarmup grows the rate."""
    rank, workers = lab.job.rank, lab.job.num_workers
    rates = []

    class Own(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            logs.update(mean_of=rank + epoch, sum_of=rank + 1, largest=rank, chiefs=-rank)

        def on_train_batch_begin(self, batch, logs=None):
            rates.append(float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate)))

    reduction = kd.callbacks.MetricsReduction(
        {"sum_of": "sum", "largest": "max", "chiefs": "chief"}
    )
    warmup = kd.callbacks.LearningRateWarmup(0.1, epochs=2)
    history = _fit(_model(lab), [warmup, Own(), reduction]).history
    mean = (workers - 1) / 2
    lab.equal(history["mean_of"], [mean, mean + 1, mean + 2])
    lab.equal(history["sum_of"], [workers * (workers + 1) // 2] * 3)
    lab.equal(history["largest"], [workers - 1] * 3)
    lab.equal(history["chiefs"], [0, 0, 0])
    # In equal steps, and then it stays.
    start, steps = 0.1 / lab.replicas, 2 * BATCHES
    grown = [start + min(step / steps, 1.0) * (0.1 - start) for step in range(3 * BATCHES)]
    lab.equal(np.array(rates), np.array(grown))
    with lab.raises(ValueError, "one of .*'mean'.* Received: reductions="):
        kd.callbacks.MetricsReduction({"loss": "median"})


@case("workers")
def checkpoints(lab):
    """ModelCheckpoint decides on every worker, the chief writes whole files; so does ChiefOnly."""
    heard, models, chief = [], [], lab.job.is_chief
    listener = noting("on_epoch_end", heard)
    listener.set_model = models.append  # where TensorBoard writes the model's graph
    with lab.folder() as folder:
        own = folder / f"{lab.job.rank}-{{epoch}}.keras"
        log = folder / f"{lab.job.rank}-log.csv"
        checkpoint = keras.callbacks.ModelCheckpoint(str(own), monitor="loss", save_best_only=True)
        model = _model(lab)
        writing = [keras.callbacks.CSVLogger(str(log)), kd.callbacks.ChiefOnly(listener)]
        history = _fit(model, [checkpoint, *writing]).history
        lab.equal(heard, [0, 1, 2] if chief else [])
        lab.equal(len(models), int(chief))
        lab.check(log.exists() == chief, f"{log} of worker {lab.job.rank}")
        lab.equal(checkpoint.best, min(history["loss"]))
        found = sorted(path.name for path in folder.glob(f"{lab.job.rank}-*.keras"))
        lab.equal(found, ["0-1.keras", "0-2.keras", "0-3.keras"] if chief else [])
        lab.check(not list(folder.glob("unfinished*")), "an unfinished file is left")
        x, _ = regression(6)
        expected = model.predict(x, verbose=0)
        lab.everyone("written")
        loaded = keras.models.load_model(folder / "0-3.keras")
        lab.equal(loaded.predict(x, verbose=0), expected)


@case("workers")
def checkpoints_in_the_background(lab):
    """`save="async"`: the chief writes, and when `fit` ends all workers read the last file."""
    x, _ = regression(6)
    chief = lab.job.is_chief
    with lab.folder() as folder, disk() as slow:
        options = {"monitor": "loss", "save_best_only": True, "save": "async"}
        checkpoint = kd.callbacks.ModelCheckpoint(folder / "{epoch}.keras", **options)
        model = _model(lab)
        history = _fit(model, [checkpoint, slow.after(1, 3)]).history
        lab.equal(checkpoint.best, min(history["loss"]))
        loaded = keras.models.load_model(folder / "3.keras")
        lab.equal(loaded.predict(x, verbose=0), model.predict(x, verbose=0))
        lab.equal(slow.names, ["1.keras", "2.keras", "3.keras"] if chief else [])
        (folder / "taken.keras").mkdir(exist_ok=True)
        lab.everyone("made")
        checkpoint = kd.callbacks.ModelCheckpoint(folder / "taken.keras", save="async")
        with lab.raises((OSError, kd.errors.JobError), "irectory|Expected worker 0 to save"):
            _fit(model, [checkpoint], epochs=1)
        # The chief alone has the callback, unless no worker alone can read the state.
        has_it = chief or lab.strategy().replica_set.divides_state
        if has_it:
            checkpoint = kd.callbacks.ModelCheckpoint(folder / "chief.keras", save="async")
        _fit(model, [checkpoint] if has_it else [], epochs=1)
        lab.everyone("saved")
        loaded = keras.models.load_model(folder / "chief.keras")
        lab.equal(loaded.get_weights(), model.get_weights())
        lab.everyone("read")
        lab.check(not list(folder.glob("unfinished*")), "an unfinished file is left")


@case("workers")
def stop_in_an_epoch(lab):
    """`stop_training` stops all workers: at once, if one alone sets it after the next batch."""
    second, seen, model = lab.job.rank == 1, [], _model(lab)

    class Stop(keras.callbacks.Callback):
        def __init__(self, here, **at):
            super().__init__()
            self.at = at if here else {}

        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training |= batch == self.at.get("batch")

        def on_epoch_end(self, epoch, logs=None):
            self.model.stop_training |= epoch == self.at.get("epoch")

    count = noting("on_train_batch_end", seen)
    early = keras.callbacks.EarlyStopping(monitor="loss", patience=0, min_delta=10.0)
    for stopper, batches in (
        (Stop(True, batch=2), 3),
        (Stop(second, batch=2), 4),
        (Stop(second, epoch=1), 2 * BATCHES),
        (early, 2 * BATCHES),
    ):
        seen.clear()
        _fit(model, [count, stopper])
        lab.equal(lab.everyone(len(seen)), [batches] * lab.job.num_workers)


@case("workers")
def broadcast_of_variables(lab):
    """BroadcastGlobalVariables sends what the chief alone has changed."""
    model = _model(lab)
    _fit(model, [], epochs=1)
    if not lab.job.is_chief:
        model.set_weights([array + 1.0 for array in model.get_weights()])
    _fit(model, [kd.callbacks.BroadcastGlobalVariables()], epochs=1)
    lab.alike([array.tolist() for array in values(model.weights)])
    with lab.raises(ValueError, "the chief .*Received: root_rank=1"):
        kd.callbacks.BroadcastGlobalVariables(1)


@case("workers", like="worker_callbacks.restart_of_shards")
def auto_backups(lab):
    """`save_freq="auto"`: the chief chooses for all, though their clocks differ; all restart so."""

    def run(folder, at):
        model = _model(lab)
        # By the chief's clock three batches take a second, and a backup another one; this
        # time between failures gives 1.6 seconds, or five batches, between two backups.
        backup = kd.callbacks.BackupAndRestore(folder, "auto", hours_between_failures=2.5 / 3600)
        callbacks = [backup] if at is None else [backup, interrupting_after(at)]
        # Equal parts: with others torch applies the weights elsewhere in a run's first step.
        history = _fit(model, callbacks, shuffle=True, batch_size=4)
        return [history.history["loss"], *model.get_weights()]

    expected, found = with_chosen_interval(
        lab,
        run,
        itertools.count(0, lab.job.rank + 1).__next__,
        [(1, 0), (1, 0), (1, 5), (2, 4), (3, 0)],
        ((4, []), (12, [(1, 0), (1, 0), (1, 5)]), (6, [(2, 4)])),
    )
    for one, other in zip(found, expected, strict=True):
        lab.check(np.array_equal(one, other), f"{one} instead of {other}")


@case("workers", like="worker_callbacks.restart_of_shards")
def torn_backups(lab):
    """A backup that is torn, or a part of it, is refused, the one before used; unfinished ones go.

    A backup of another model is refused on every worker, and stays.
    """
    with lab.folder() as folder:
        kept = kd.callbacks.BackupAndRestore(folder, delete_checkpoint=False)
        _fit(_model(lab), [kept], epochs=3)
        lab.everyone("written")
        other = lab.made(lambda: dense("sgd"))
        said = rf"\[worker {lab.job.rank}/{lab.job.num_workers}\] Expected.*of this call of fit"
        with lab.raises(kd.errors.BackupError, said):
            _fit(other, [kd.callbacks.BackupAndRestore(folder)], epochs=3)
        lab.everyone("refused")
        newest = max(folder.glob("backup-*[0-9].kdb"))
        # Where workers divide the state, another one's part.
        part = f"{newest.stem}-*-part{writers(lab) - 1}.kdb"
        torn = max(folder.glob(part), default=newest)
        lab.everyone("looked")
        if lab.job.is_chief:
            torn.write_bytes(torn.read_bytes()[:-7])
            newest.with_name(f"unfinished-4711-1-{newest.name}").write_bytes(
                b"of a chief that was killed"
            )
        lab.everyone("torn")
        model = _model(lab)
        seen = []
        watch = noting("on_epoch_begin", seen)
        with lab.told("is torn") as messages:
            _fit(model, [kd.callbacks.BackupAndRestore(folder), watch], epochs=3)
        lab.equal(len(messages), 1 if lab.job.is_chief else 0)
        lab.equal(seen, [2])
        lab.everyone("ended")
        lab.equal(list(folder.iterdir()), [])


@case("workers", like="worker_callbacks.restart_of_shards")
def a_full_disk(lab):
    """Where one worker's disk takes no backup, all of them train on."""
    ended = {}
    for rank in (None, 0, lab.job.num_workers - 1):
        with lab.folder() as folder, lab.told("could not be written") as told:
            kept = kd.callbacks.BackupAndRestore(folder, delete_checkpoint=False)
            model = _model(lab)
            with full_disk(200, here=lab.job.rank == rank) as filling:
                history = _fit(model, [kept, filling], epochs=2)
            ended[rank] = history, values(model.variables), optimizer_values(model)
            said = lab.everyone(told)
            names = sorted(path.name for path in folder.iterdir() if "part" not in path.name)
            lab.everyone("looked")
        writes = rank == 0 or (rank and kept._files.in_parts)
        lab.equal([len(each) for each in said], [int(bool(writes))] + [0] * (len(said) - 1))
        lab.equal(names[-1], "backup-000000000002.kdb")
        lab.equal(len(names), 1 if writes else 2)
        lab.equal(ended[rank], ended[None])


@case("workers", like="worker_callbacks.restart_of_shards")
def kerass_own_backups(lab):
    """Keras's own BackupAndRestore acts on the chief, and what it restores goes to all."""
    with lab.folder() as folder:
        # A folder of its own for each worker: the chief's is the one that counts.
        own = str(folder / str(lab.job.rank))
        seen = []
        watch = noting("on_epoch_begin", seen)
        stop = interrupting_after(BATCHES + 1)
        with contextlib.suppress(InterruptionError):
            _fit(_model(lab), [keras.callbacks.BackupAndRestore(own), stop])
        model = _model(lab)
        _fit(model, [keras.callbacks.BackupAndRestore(own), watch])
        lab.equal(seen, [1, 2])
        lab.alike([array.tolist() for array in values(model.weights)])


@case("workers")
def restart_of_shards(lab):
    """Each worker reads its part of a shuffled pipeline, and goes on where it was.

    Another number of workers, which would make other batches of it, is refused.
    """
    from kerasdist.input.autoshard import WorkerBatches

    def data():
        tf.random.set_seed(3)
        rows = tf.data.Dataset.from_tensor_slices(regression(interruptions.ROWS))
        policy = kd.InputOptions(auto_shard_policy=kd.AutoShardPolicy.DATA)
        batches = rows.shuffle(24).batch(interruptions.BATCH)
        return {"x": lab.strategy().distribute_dataset(batches, policy)}

    exact(lab, data)
    with lab.folder() as folder:
        with contextlib.suppress(InterruptionError):
            interruptions.run(lab, folder, data, at=7)
        lab.everyone("interrupted")
        more = mock.PropertyMock(return_value=7)
        with (
            mock.patch.object(WorkerBatches, "num_workers", more),
            lab.raises(kd.errors.BackupError, "read their own part is . in the backup and 7 in"),
        ):
            interruptions.run(lab, folder, data)
        lab.everyone("refused")


@case("workers")
def telemetry(lab):
    """Telemetry: each worker's file has the same global counts; the chief's names the slowest."""
    from kerasdist.backends.base.model_trainer import trainer_of

    rank, workers = lab.job.rank, lab.job.num_workers
    slow = 1 % workers

    # Long enough that batches read ahead while a step waits for the machine do not hide it.
    data = slow_batches(ROWS, BATCH, seconds=0.3 * (rank == slow))
    with lab.folder() as folder:
        model = _model(lab)
        keras.utils.set_random_seed(12)
        watch = kd.callbacks.Telemetry(folder, every=1e-3)
        replicas = type(trainer_of(model).replicas)
        with mock.patch.object(replicas, "device_kind", return_value="TPU v6 lite"):
            model.fit(data, epochs=2, verbose=0, callbacks=[watch])
        lines = lines_of(folder, rank)
        require_sound(lab, lines)
        products = 4 * 6 + 6 * 1
        devices = len(lines[0]["devices"]) * workers
        flops = {"per_sample": 6 * products, "peak": devices * 918e12}
        lab.check(lines[0]["flops"] == flops, str(lines[0]))
        lab.check(all(one["mfu"] > 0 for one in lines[1:]), str(lines))
        epochs = of_kind(lines, "epoch")
        lab.equal([[ROWS, BATCHES]] * 2, [[one["samples"], one["steps"]] for one in epochs])
        lab.equal(2 * ROWS, sum(one["samples"] for one in of_kind(lines, "window")))
        lab.equal(lab.backend == "torch", lines[0]["measured"]["collectives"])
        lab.check(all(("slowest" in one) == lab.job.is_chief for one in epochs), str(epochs))
        if lab.job.is_chief:
            found = epochs[-1]["slowest"]
            lab.equal(slow, found["worker"])
            lab.equal("own_ms" if lab.backend == "torch" else "data_ms", found["by"])
            # The difference: where other processes want the cores, all steps take longer.
            more = found["ms"] - found["others_ms"]
            lab.check(found["ms"] > 80 and more > 40, str(epochs[-1]["by_worker"]))
        everyone = lab.everyone(len(list(folder.glob("events.*"))))
        lab.equal([1] * workers, everyone)


@case("workers")
def orbax_checkpoint(lab):
    """OrbaxCheckpoint is refused by name: each worker would write to one folder."""
    if "OrbaxCheckpoint" not in dir(keras.callbacks):  # before Keras 3.13
        return
    callback = object.__new__(keras.callbacks.OrbaxCheckpoint)  # Orbax need not be installed
    with lab.raises(kd.errors.UnsupportedError, "chief alone write.*Received: OrbaxCheckpoint"):
        _fit(_model(lab), [callback])
    _fit(_model(lab), [], epochs=1)
