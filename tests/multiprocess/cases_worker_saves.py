"""Saving on several workers: one whole file, whoever of them calls `save`."""

import contextlib
from pathlib import Path
from unittest import mock

from kerasdist.core import whole_files
from tests.conformance.lazy import kd, keras
from tests.conformance.models import dense, regression, stack
from tests.conformance.registry import case


@contextlib.contextmanager
def written():
    """The names of files that this worker puts in their place as a whole."""
    names, original = [], whole_files.replacing

    def replacing(path):
        names.append(Path(path).name)
        return original(path)

    with mock.patch.object(whole_files, "replacing", replacing):
        yield names


def trained(lab, **options):
    x, y = regression(12)
    layers = [keras.layers.Dense(64), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
    model = lab.made(lambda: stack(layers, "adam", metrics=["mae"]), **options)
    model.fit(x, y, batch_size=5, verbose=0)
    return model, x


@case("workers")
def save_on_all_workers(lab):
    """Each way to save, on all workers to one path: the chief writes, and all can read at once."""
    model, x = trained(lab)
    expected = model.predict(x, verbose=0)
    with lab.folder() as folder, written() as names:
        for _ in range(3):
            model.save(folder / "m.keras")
            loaded = keras.models.load_model(folder / "m.keras")
            lab.equal(loaded.get_weights(), model.get_weights())
        for path, options in (("again.keras", {}), ("folder", {"zipped": False}), ("m.h5", {})):
            keras.saving.save_model(model, folder / path, **options)
            again = keras.models.load_model(folder / path, compile=False)
            lab.equal(again.predict(x, verbose=0), expected)
        model.save_weights(str(folder / "m.weights.h5"))
        model.save_weights(str(folder / "s.weights.json"), max_shard_size=1)
        for name in ("m.weights.h5", "s.weights.json"):
            loaded.set_weights([array + 1 for array in loaded.get_weights()])
            loaded.load_weights(folder / name)
            lab.equal(loaded.get_weights(), model.get_weights())
        own = ["m.keras"] * 3 + ["again.keras", "folder", "m.h5", "m.weights.h5"]
        lab.equal(names, own if lab.job.is_chief else [])
        lab.everyone("read")
        lab.check(not list(folder.glob("unfinished*")), "an unfinished file is left")
    model.fit(x, x[:, :1], batch_size=5, verbose=0)  # the workers go on together


@case("workers")
def chief_alone_in_the_scope(lab):
    """What the chief alone makes in the scope and drops, as for a checkpoint."""
    x, y = regression(12)
    with lab.folder() as folder, lab.strategy().scope():
        keras.backend.clear_session(free_memory=False)  # Keras forgets what it knows of optimizers
        model = dense()
        checkpoints = [
            keras.callbacks.ModelCheckpoint(folder / "best.keras", "loss", save_best_only=True),
            keras.callbacks.ModelCheckpoint(folder / "all.weights.h5", save_weights_only=True),
        ]
        model.fit(x, y, batch_size=5, epochs=2, callbacks=checkpoints, verbose=0)
        if lab.job.is_chief:
            keras.backend.clear_session(free_memory=False)
            model.save(folder / "chief.keras")
            keras.models.load_model(folder / "chief.keras")
            keras.models.clone_model(model).summary(print_fn=lambda *_: None)
        model.evaluate(x, y, verbose=0)
        model.load_weights(folder / "all.weights.h5")
        loaded = keras.models.load_model(folder / "best.keras")
        for one in (model, loaded):
            one.fit(x, y, batch_size=5, verbose=0)
            lab.alike([array.tolist() for array in one.get_weights()])


@case("workers", like="worker_saves.save_on_all_workers")
def save_on_some_workers(lab):
    """One worker alone, and each worker to a path of its own: nothing waits for the others."""
    model, x = trained(lab, sharding=None)  # a strategy that has run no custom loop
    rank, expected = lab.job.rank, model.get_weights()
    with lab.folder() as folder:
        if lab.job.is_chief:
            model.save(folder / "chief.keras")
        model.save(folder / f"{rank}.keras")
        if rank == 1:
            model.save(folder / "worker.keras")
        model.fit(x, x[:, :1], batch_size=5, verbose=0)
        for name in ("chief", "worker", *range(lab.job.num_workers)):
            loaded = keras.models.load_model(folder / f"{name}.keras")
            lab.equal(loaded.get_weights(), expected)
        plain = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        plain.save(folder / f"plain-{rank}.keras")  # of no strategy: plain Keras's code
        lab.everyone("saved")
        lab.equal(len(list(folder.glob("plain-*"))), lab.job.num_workers)


@case("workers")
def save_after_a_custom_loop(lab):
    """All workers save a model with moving statistics that a custom loop has updated.

    Reading them needs all workers; where the chief cannot write, the others must not wait for it.
    """
    strategy = lab.strategy()
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.BatchNormalization()])
    x, _ = regression(8)
    for _ in range(2):
        batches = strategy.distribute_dataset([(x,)])
        strategy.run(lambda batch: model(batch[0], training=True), args=(next(iter(batches)),))
    with lab.folder() as folder:
        model.save(folder / "m.keras")
        loaded = keras.models.load_model(folder / "m.keras")
        link = folder / "missing.weights.h5"
        if lab.job.is_chief:
            link.symlink_to(folder / "missing" / link.name)
        lab.everyone("linked")
        missing = [(model.save, "m.keras"), (model.save_weights, "m.weights.h5")]
        missing = [(save, folder / "missing" / name) for save, name in missing]
        for save, path in [*missing, (model.save_weights, link)]:
            with lab.raises(
                (OSError, kd.errors.JobError), "No such file|Unable|Expected worker 0 to sa"
            ):
                save(path)
    lab.equal(loaded.get_weights(), model.get_weights())
