"""What a run takes from a folder of backups, what it refuses, and who may use the folder."""

import contextlib
import os
import socket
import stat
import subprocess
import sys

import numpy as np

from tests.conformance.interruptions import (
    BATCH,
    BATCHES,
    ROWS,
    InterruptionError,
    full_disk,
    interrupting,
    same,
)
from tests.conformance.lab import fresh, optimizer_values, values
from tests.conformance.lazy import kd, keras
from tests.conformance.models import regression
from tests.conformance.registry import case


def small_model(change):
    layers = keras.layers
    two = [
        layers.Dense(4, "relu" if change == "activation" else "tanh", name="one"),
        layers.Dense(4, "tanh", name="two"),
    ]
    last = [
        layers.Dropout(0.5 if change == "dropout" else 0.3),
        layers.Dense(2 if change == "units" else 1),
    ]
    model = keras.Sequential([keras.Input((4,)), *(two[::-1] if change == "swap" else two), *last])
    optimizer = keras.optimizers.SGD(
        0.02 if change == "learning rate" else 0.01, momentum=0.5 if change == "momentum" else 0.9
    )
    model.compile(
        keras.optimizers.Adam() if change == "optimizer" else optimizer,
        "mae" if change == "loss" else "mse",
        metrics=["mse" if change == "metrics" else "mae"],
        run_eagerly=change == "eagerly",
    )
    return model


def small(lab, folder, at=None, change="", listed=(), **options):
    """A process of a script that trains two epochs; ``change``: what is another than before."""
    fresh()
    seed = 9 if change == "rows" else 0
    model = lab.made(lambda: small_model(change))
    x, y = regression(ROWS + (4 if change == "number of rows" else 0), seed=seed)
    if change == "units":
        y = np.concatenate([y, y], axis=-1)
    given = {"x": x, "y": y, "batch_size": 8 if change == "batch size" else BATCH}
    if change == "class weight":
        given["class_weight"] = {0: 2.0}
    if change == "sample weight":
        given["sample_weight"] = np.ones(len(x), "float32")
    if change == "steps":
        given["steps_per_epoch"] = 4
    if change == "kind of data":
        pairs = [(x[at : at + BATCH], y[at : at + BATCH]) for at in range(0, ROWS, BATCH)]
        given = {"x": (pair for pair in pairs * 2), "steps_per_epoch": BATCHES}
    keras.utils.set_random_seed(5)
    backup = kd.callbacks.BackupAndRestore(folder, save_freq=3, **options)
    stop = [interrupting(at)] if at else []
    history = model.fit(
        epochs=2, shuffle=True, verbose=0, callbacks=[backup, *stop, *listed], **given
    )
    return [history.history, values(model.variables), optimizer_values(model)]


def interrupted(lab, folder):
    """The same, which dies after batch 7: its last backup is that after batch 6."""
    with contextlib.suppress(InterruptionError):
        small(lab, folder, at=7)
    lab.everyone("interrupted")


# What another script has, and how the error says so.
CHANGES = {
    "swap": "\"Dense 'one'\" in the backup and \"Dense 'two'\" in this script",
    "activation": "(Dense 'one').activation is 'tanh' in the backup and 'relu' in this script",
    "dropout": "rate is 0.3 in the backup and 0.5 in this script",
    "units": "units is 1 in the backup and 2 in this script",
    "momentum": "optimizer.momentum is 0.9 in the backup and 0.5 in this script",
    "optimizer": "optimizer.class is 'SGD' in the backup and 'Adam' in this script",
    "loss": "loss is 'mse' in the backup and 'mae' in this script",
    "metrics": "metrics[0] is 'mae' in the backup and 'mse' in this script",
    "number of rows": "x.shape is '(32, 4)' in the backup and '(36, 4)' in this script",
    "batch size": "batch_size is 4 in the backup and 8 in this script",
    "class weight": "class_weight is None in the backup and",
    "sample weight": "sample_weight is 'nothing' in the backup and",
    "steps": "steps_per_epoch is None in the backup and 4 in this script",
    "kind of data": "'generator' in this script",
}


def refused(lab, folder, *parts, **options):
    """`fit` refuses the folder, and says why on every worker."""
    error = ""
    try:
        small(lab, folder, **options)
    except kd.errors.BackupError as raised:
        error = str(raised)
    for told in lab.everyone(error):
        for part in parts:
            lab.check(part in told, f"{options}: {part!r} is not in {told!r}")


@case("restarts", replicas=(2,), like="restarts.crafted_backups")
def of_another_script(lab):
    """A backup of another model or of other data is refused, with what differs."""
    with lab.folder() as whole, lab.folder() as folder:
        expected = small(lab, whole)
        interrupted(lab, folder)
        kept = sorted(path.name for path in folder.iterdir())
        for change, said in CHANGES.items():
            refused(lab, folder, "of this call of fit", said, "another folder", change=change)
        lab.everyone("refused")
        lab.equal(sorted(path.name for path in folder.iterdir()), kept)
        lab.check(same(small(lab, folder), expected), "the refused backups are not what they were")


@case("restarts", replicas=(2,), like="restarts.on_twice_as_many_replicas")
def weights_alone(lab):
    """`resume="weights"` begins another call anew, with the weights of the backup."""

    class Noting(keras.callbacks.Callback):
        """Notes the weights and the number of updates, once."""

        def __init__(self, batch):
            super().__init__()
            self.batch, self.seen = batch, None

        def on_train_batch_begin(self, batch, logs=None):
            if batch == self.batch and self.seen is None:
                self.seen = values([*self.model.weights, self.model.optimizer.iterations])

    def script(folder, batch, at=None, **options):
        note, history = Noting(batch), {}
        with contextlib.suppress(InterruptionError):
            history, *_ = small(lab, folder, at=at, listed=[note], resume="weights", **options)
        lab.everyone("ended")
        return note.seen, history

    changes = {"batch size": "batch_size is", "optimizer": "optimizer.class is"}
    for change, said in changes.items():
        with lab.folder() as folder, lab.told("begins anew") as told:
            [*kept, updates], _ = script(folder, 6, at=7)  # the backup is after batch 6
            lab.equal(updates, 6)
            # This run ends after its own backup, and the next run goes on from that.
            [*taken, updates], _ = script(folder, 0, at=4, change=change)
            lab.check(same(taken, kept) and updates == 0, f"{change}: {taken} instead of {kept}")
            _, history = script(folder, 0, change=change)
            lab.equal(len(history["loss"]), 2)
            messages = lab.everyone(told)[0]
        lab.check(len(messages) == 1 and said in messages[0], f"{messages}")
    with lab.folder() as folder:
        script(folder, 6, at=7)
        refused(lab, folder, "Expected the weights of the backup", change="units", resume="weights")


@case("restarts", replicas=(2,), like="restarts.crafted_backups")
def what_may_differ(lab):
    """With another learning rate, or other rows, a warning says what goes on."""
    said = {"learning rate": "learning_rate is 0.0", "rows": "data.x.checksum of rows is"}
    for change, part in said.items():
        with lab.folder() as folder, lab.told(part) as told:
            interrupted(lab, folder)
            found = small(lab, folder, change=change)
            messages = lab.everyone(told)[0]
        lab.check(len(messages) == 1, f"{change}: {messages}")
        if change == "learning rate":  # as plain Keras does it, which restores the optimizer
            with lab.folder() as folder:
                lab.check(same(found, small(lab, folder)), "the rate is not the backup's")


@case("restarts", replicas=(2,), like="restarts.crafted_backups")
def a_full_disk(lab):
    """Where the disk takes no backup, a warning says so, and training goes on."""
    noting = lab.told("could not be written")
    with lab.folder() as whole, lab.folder() as folder, noting as told:
        with full_disk(2000) as filling:
            expected = small(lab, whole)
            found = small(lab, folder, listed=[filling], delete_checkpoint=False)
        lab.everyone("trained")
        names = sorted(path.name for path in folder.iterdir())
        messages = lab.everyone(told)
    lab.check(same(found, expected), f"{found} instead of {expected}")
    lab.equal(len(messages[0]), 1)
    lab.check("Backup 3" in messages[0][0] and "File too large" in messages[0][0], messages[0][0])
    of_chief = [name for name in names if "-part" not in name]
    lab.equal(of_chief, ["backup-000000000005.kdb", "backup-000000000006.kdb"])
    of_parts = {name[: len("backup-000000000005")] for name in names if name not in of_chief}
    lab.check(of_parts <= {name[:-4] for name in of_chief}, f"{names}")


# This is another run, which uses the folder until its input ends.
OTHER = """
import fcntl, json, os, socket, sys
file = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
fcntl.lockf(file, fcntl.LOCK_EX)
os.write(file, json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "since": "noon"}).encode())
print("holds", flush=True)
sys.stdin.read()
"""  # noqa: E501


@contextlib.contextmanager
def another_run(lab, folder):
    """Another process that trains with the same folder, on the chief's machine."""
    if lab.everyone(os.getpid())[0] != os.getpid():
        yield lab.everyone(None)[0]
        lab.everyone("ended")
        return
    command = [sys.executable, "-c", OTHER, str(folder / "in-use.json")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as process:
        process.stdout.readline()
        yield lab.everyone(process.pid)[0]
        process.stdin.close()
        process.wait(30)
    lab.everyone("ended")


@case("restarts", replicas=(2,), like="restarts.crafted_backups")
def two_runs_in_one_folder(lab):
    """A second run in a folder is refused, until the first has ended."""
    with lab.folder() as folder:
        interrupted(lab, folder)
        kept = sorted(path.name for path in folder.iterdir())
        with another_run(lab, folder) as pid:
            refused(lab, folder, f"process {pid} on {socket.gethostname()}", "since noon")
        left = {path.name for path in folder.iterdir()} - {"in-use.json"}
        lab.equal(sorted(left), kept)
        lab.everyone("looked")
        small(lab, folder)
        lab.everyone("trained")
        lab.equal(list(folder.iterdir()), [])


@case("restarts", replicas=(2,), like="restarts.py_dataset")
def backups_are_the_owners(lab):
    """Other users cannot read a backup, unless the script allows it."""
    for options, mode in (({}, 0o600), ({"file_mode": 0o640}, 0o640)):
        with lab.folder() as folder:
            small(lab, folder, delete_checkpoint=False, **options)
            lab.everyone("trained")
            modes = {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
            lab.equal(modes, {mode})
            lab.everyone("looked")


@case("restarts", replicas=(2,))
def crafted_backups(lab):
    """Values of another kind in a backup with a valid digest end in a clear error."""
    from kerasdist.callbacks.backup import storage

    with lab.folder() as folder:
        interrupted(lab, folder)
        [path, older] = storage.newest_first(folder)
        stored, newest = storage.read(path), storage.number_of(path)
        # Where workers divide the state, None stands for what their parts hold.
        forms = enumerate(stored.forms)
        arrays = [None if form is None else stored.array(number) for number, form in forms]
        is_writer = lab.everyone(os.getpid())[0] == os.getpid()
        if is_writer:
            older.unlink()
        names = ("number", "epoch", "batches", "random", "position", "forms")
        crafted = [{name: one} for name in names for one in (None, "one")]
        crafted += [{"position": {**stored.facts["position"], "passed": "one"}}]
        crafted += [{"random": {"python": 3}}, {"callbacks": None}, {"callbacks": [3]}]
        for change in crafted:
            if is_writer:
                facts = {**stored.facts, **change}
                storage.write_file(storage.path_of(folder, newest), facts, arrays)
            lab.everyone("written")
            said = []
            with lab.told("is not used") as told, contextlib.suppress(InterruptionError):
                try:
                    small(lab, folder, at=1, change="eagerly")  # it begins anew
                except kd.errors.BackupError as error:
                    said = [str(error)]
            said = lab.everyone(said or told)[0]
            lab.check(len(said) == 1, f"{str(change)[:200]}: {said}")
