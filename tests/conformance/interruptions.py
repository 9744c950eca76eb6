"""A run of `fit` that is interrupted and started again, beside one that nothing interrupts.

An exception ends `fit` in the middle of an epoch. What follows is what a script does that is
started again: new seeds, model, data and callbacks, and only the folder of the backups the same.
"""

import contextlib
import resource
from unittest import mock

import numpy as np

from tests.conformance.lab import fresh, optimizer_values, values
from tests.conformance.lazy import kd, keras
from tests.conformance.models import regression, stack

ROWS, BATCH, BATCHES, EPOCHS = 32, 4, 8, 3
INTERRUPTED_AT = (7, 20)


class InterruptionError(Exception):
    """Stands for whatever ends a process."""


def interrupting_after(batches):
    """Raises after so many batches of the calls of `fit` that it is passed to."""
    left = [batches]

    def count(batch, logs):
        left[0] -= 1
        if left[0] == 0:
            raise InterruptionError

    return keras.callbacks.LambdaCallback(on_train_batch_end=count)


def interrupting(at):
    """Raises after a batch, counted from the begin of the run; a half more: as its epoch ends."""
    here = {"epoch": 0}

    def end(epoch, logs):
        if (epoch + 1) * BATCHES + 0.5 == at:
            raise InterruptionError

    def note(epoch, logs):
        here["epoch"] = epoch

    def strike(batch, logs):
        if here["epoch"] * BATCHES + batch + 1 == at:
            raise InterruptionError

    return keras.callbacks.LambdaCallback(
        on_epoch_begin=note, on_train_batch_end=strike, on_epoch_end=end
    )


@contextlib.contextmanager
def full_disk(size, here=True):
    """A callback by which the process writes no longer file from the end of the first epoch on."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(epoch, logs):
        if epoch == 0 and here:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))

    def lift(epoch=0, logs=None):
        resource.setrlimit(resource.RLIMIT_FSIZE, before)

    try:
        yield keras.callbacks.LambdaCallback(on_epoch_end=limit, on_epoch_begin=lift)
    finally:
        lift()


def network(optimizer="adam", **options):
    layers = keras.layers
    return stack(
        [layers.Dense(4, "tanh"), layers.Dropout(0.3), layers.Dense(1)], optimizer, **options
    )


def run(
    lab,
    folder,
    data,
    callbacks=lambda folder: [],
    at=None,
    build=network,
    strategy=None,
    backups=(("save_freq", 3),),
    **options,
):
    """A process of a script: all of it is made again, and the folder is all that stays."""
    fresh()
    with (strategy or lab.strategy)().scope():
        model = build()
    arguments = {"epochs": EPOCHS, "verbose": 0, **data(), **options}
    listed = callbacks(folder)
    if at is not None:
        listed.append(interrupting(at))
    backup = kd.callbacks.BackupAndRestore(folder / "backups", **dict(backups))
    keras.utils.set_random_seed(5)
    history = model.fit(callbacks=[backup, *listed], **arguments)
    return {
        "history": history.history,
        "epochs": history.epoch,
        "weights": values(model.variables),
        "optimizer": optimizer_values(model),
        "callbacks": [getattr(one, "shown", None) for one in listed],
        "files": {
            path.name: path.read_bytes()
            for path in sorted(folder.iterdir())
            if path.suffix == ".csv"
        },
    }


def exact(lab, data, callbacks=lambda folder: [], at=INTERRUPTED_AT, lost=(), **options):
    """A run that is interrupted twice is that which is not.

    ``lost``: what the first backup says that it cannot bring back.
    """
    with lab.folder() as whole, lab.folder() as torn:
        with telling(lab, lost):
            expected = run(lab, whole, data, callbacks, **options)
        for batches in at:
            with contextlib.suppress(InterruptionError), telling(lab, lost):
                run(lab, torn, data, callbacks, at=batches, **options)
                lab.check(False, f"not interrupted at batch {batches}")
        with telling(lab, lost):
            found = run(lab, torn, data, callbacks, **options)
        lab.everyone("trained")
        lab.check(not list((torn / "backups").iterdir()), "backups are left")
    if lost:
        return
    for name, one in expected.items():
        lab.check(same(found[name], one), f"{name}: {found[name]} instead of {one}")


def with_chosen_interval(lab, run, clock, saves, interruptions):
    """A run with `save_freq="auto"` that is interrupted backs up where the other does.

    ``run(folder, at)`` is the script; ``saves`` are the backups of the run that nothing interrupts,
    ``interruptions`` after which batch the other is ended, and the backups it has made by then.
    """
    saved, save = [], kd.callbacks.BackupAndRestore.save

    def noting(backup, epoch, batches):
        saved.append((epoch, batches))
        save(backup, epoch, batches)

    with (
        mock.patch.object(kd.callbacks.BackupAndRestore, "save", noting),
        mock.patch("kerasdist.callbacks.backup.interval.perf_counter", clock),
        lab.folder() as whole,
        lab.folder() as torn,
    ):
        expected = run(whole, None)
        lab.equal(saved, saves)
        for at, made in interruptions:
            saved.clear()
            with contextlib.suppress(InterruptionError):
                run(torn, at)
                lab.check(False, f"not interrupted after {at} batches")
            lab.equal(saved, made)
        saved.clear()
        found = run(torn, None)
        lab.equal(saved, saves[-1:])
    return expected, found


def same(one, other):
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return np.array_equal(one, other)


@contextlib.contextmanager
def telling(lab, lost):
    """One warning, on one worker, names all that is lost, and there is none otherwise."""
    with lab.told("cannot bring back") as told:
        yield
    messages = [one for theirs in lab.everyone(told) for one in theirs]
    lab.check(len(messages) == bool(lost), f"{messages}")
    for part in lost:
        lab.check(part in messages[0], f"{part} is not in {messages[0]}")


def arrays(shuffle=True):
    def data():
        x, y = regression(ROWS)
        v, u = regression(6, seed=9)
        return {
            "x": x, "y": y, "validation_data": (v, u), "batch_size": BATCH, "shuffle": shuffle
        }  # fmt: skip

    return data
